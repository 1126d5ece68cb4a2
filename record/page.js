// The viewer of episodes. Texts are set by textContent only, so markup in them is shown as text.
"use strict";

const episodes = JSON.parse(document.getElementById("data").textContent);
const columns = { solved: document.getElementById("solved"), failed: document.getElementById("failed") };
const agents = [...document.querySelectorAll("[data-agent]")].map((button) => button.dataset.agent);
const keysOfStages = { s: "start", m: "middle", e: "end", w: "" };
const explanations = {
  explorer: "B learns from dense rewards. Its episodes come first where the dense reward and the outcome " +
    "disagree most: solved with a low dense reward, not solved with a high one. B's advantages come from dense rewards.",
  buffer: "B plays these into the replay buffer after its last update. They count by their outcome, which their " +
    "advantages come from. They have no dense scores.",
  policy: "A's own episodes, which count by their outcome.",
  replayed: "Drawn from the buffer in the loop's last update of A. Age: updates of A since they were played. " +
    "Centre c = \u03c0_old/\u03c0_B, ratio r = \u03c0/\u03c0_B at the last optimizer step; geometric means over tokens.",
  evaluation: "Held-out games of the panel.",
};
const largestScore = Math.max(1e-9, ...episodes.flatMap((e) => e.steps.map((s) => Math.abs(s.dense_score || 0))));
const state = { agent: agents[0], stage: "", type: "", order: "misjudged", find: "", solved: 0, failed: 0 };
let lists = { solved: [], failed: [] };

// The state is kept behind the # of the address, so that a page that is read again shows the same.
function readState() {
  const saved = new URLSearchParams(location.hash.slice(1));
  for (const name of Object.keys(state)) {
    if (!saved.has(name)) continue;
    state[name] = typeof state[name] === "number" ? Number(saved.get(name)) || 0 : saved.get(name);
  }
  if (!agents.includes(state.agent)) state.agent = agents[0];
}

function saveState() {
  history.replaceState(null, "", "#" + new URLSearchParams(state));
}

function matches(episode) {
  if (episode.agent !== state.agent) return false;
  if (state.stage && episode.stage !== state.stage) return false;
  if (state.type && episode.task_type !== state.type) return false;
  if (!state.find) return true;
  const wanted = state.find.toLowerCase();
  const texts = [episode.task || "", episode.task_id || ""];
  for (const step of episode.steps) texts.push(step.observation, step.reply || "", step.action);
  return texts.some((text) => text.toLowerCase().includes(wanted));
}

function choose() {
  const found = episodes.filter(matches);
  if (state.order === "misjudged") found.sort((x, y) => (y.misjudged || 0) - (x.misjudged || 0) || x.update - y.update);
  else found.sort((x, y) => x.update - y.update);
  lists = { solved: found.filter((e) => e.success), failed: found.filter((e) => !e.success) };
}

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function signed(value, digits = 2) {
  return (value < 0 ? "\u2212" : "+") + Math.abs(value).toFixed(digits);
}

function chipsOf(episode) {
  const loop = episode.loop === undefined ? "" : `, loop ${episode.loop}`;
  const texts = [[`update ${episode.update}${loop}`], [episode.task_type], [episode.split], [episode.task_id]];
  texts.push([`${episode.turns} turns, ${episode.stop_reason}`], [`outcome ${episode.outcome}`, true]);
  if (episode.dense !== undefined) texts.push([`dense reward ${signed(episode.dense)}`, true]);
  const advantages = [...new Set(episode.steps.map((step) => step.advantage))];
  if (advantages.length === 1 && advantages[0] !== undefined) {
    texts.push([`advantage ${signed(advantages[0])}`, true]);
  }
  if (episode.age !== undefined) texts.push([`age ${episode.age}`, true]);
  for (const name of ["centre", "ratio"]) {
    const values = episode.steps.map((step) => step[name]).filter((value) => value !== undefined);
    if (!values.length) continue;
    const mean = Math.exp(values.reduce((sum, value) => sum + Math.log(value), 0) / values.length);
    texts.push([`${name} ${mean.toFixed(2)}`, true]);
  }
  const chips = element("div", "chips");
  for (const [text, strong] of texts) if (text) chips.append(element("span", strong ? "chip strong" : "chip", text));
  return chips;
}

function scoreBar(score) {
  const bar = element("span", "score");
  const fill = element("i", score < 0 ? "down" : "up");
  fill.style.width = `${50 * Math.min(1, Math.abs(score) / largestScore)}%`;
  bar.append(fill);
  bar.title = `dense score ${score}`;
  return bar;
}

function turnOf(step, severalAdvantages) {
  const turn = element("div", "turn");
  turn.append(element("div", "observation", step.observation));
  if (step.reply !== undefined && (step.valid === false || step.reply.trim() !== step.action)) {
    turn.append(element("div", "reply", step.reply));
  }
  const line = element("div", "act");
  const valid = step.valid !== false;
  line.append(element("span", valid ? "action" : "action invalid", valid ? `> ${step.action}` : "invalid reply"));
  const numbers = element("span", "numbers");
  if (severalAdvantages && step.advantage !== undefined) numbers.append(element("span", "", `A ${signed(step.advantage)}`));
  if (step.centre !== undefined) numbers.append(element("span", "", `c ${step.centre.toFixed(2)}`));
  if (step.ratio !== undefined) numbers.append(element("span", "", `r ${step.ratio.toFixed(2)}`));
  if (step.dense_score !== undefined) {
    numbers.append(element("span", "", signed(step.dense_score)), scoreBar(step.dense_score));
  }
  if (numbers.childElementCount) line.append(numbers);
  turn.append(line);
  return turn;
}

function showColumn(name) {
  const list = lists[name], column = columns[name];
  state[name] = Math.max(0, Math.min(state[name], list.length - 1));
  const pager = element("div", "pager");
  pager.append(element("b", "", name === "solved" ? "solved" : "not solved"));
  const back = element("button", "", "\u2190"), next = element("button", "", "\u2192");
  back.type = next.type = "button";
  back.ariaLabel = "previous episode";
  next.ariaLabel = "next episode";
  back.disabled = state[name] === 0;
  next.disabled = state[name] >= list.length - 1;
  back.onclick = () => move([name], -1);
  next.onclick = () => move([name], 1);
  pager.append(back, next, element("span", "", list.length ? `${state[name] + 1} of ${list.length}` : "none"));
  column.replaceChildren(pager);
  const episode = list[state[name]];
  if (!episode) {
    column.append(element("p", "none", "There is no such episode in the sample."));
    return;
  }
  column.append(element("div", "task", episode.task || ""), chipsOf(episode));
  const several = new Set(episode.steps.map((step) => step.advantage)).size > 1;
  for (const step of episode.steps) column.append(turnOf(step, several));
}

function show() {
  choose();
  for (const button of document.querySelectorAll("[data-agent]")) {
    button.ariaPressed = String(button.dataset.agent === state.agent);
  }
  for (const button of document.querySelectorAll("[data-stage]")) {
    button.ariaPressed = String(button.dataset.stage === state.stage);
  }
  document.getElementById("type").value = state.type;
  document.getElementById("order").value = state.order;
  document.getElementById("order").hidden = !episodes.some((e) => e.agent === state.agent && e.misjudged !== undefined);
  document.getElementById("find").value = state.find;
  document.getElementById("explanation").textContent = explanations[state.agent] || "";
  showColumn("solved");
  showColumn("failed");
  saveState();
}

function move(names, distance) {
  for (const name of names) state[name] += distance;
  show();
}

function set(name, value) {
  state[name] = value;
  state.solved = state.failed = 0;
  show();
}

for (const button of document.querySelectorAll("[data-agent]")) {
  button.onclick = () => set("agent", button.dataset.agent);
}
for (const button of document.querySelectorAll("[data-stage]")) {
  button.onclick = () => set("stage", button.dataset.stage);
}
document.getElementById("type").onchange = (event) => set("type", event.target.value);
document.getElementById("order").onchange = (event) => set("order", event.target.value);
document.getElementById("find").oninput = (event) => set("find", event.target.value);

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const key = event.key;
  if (["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) {
    if (key === "Escape") event.target.blur();
    return;
  }
  if (key === "ArrowRight") move(["solved", "failed"], 1);
  else if (key === "ArrowLeft") move(["solved", "failed"], -1);
  else if (key === "j") move(["solved"], 1);
  else if (key === "k") move(["solved"], -1);
  else if (key === "n") move(["failed"], 1);
  else if (key === "p") move(["failed"], -1);
  else if (key === "d") set("order", state.order === "misjudged" ? "update" : "misjudged");
  else if (key in keysOfStages) set("stage", keysOfStages[key]);
  else if (key >= "1" && key <= String(agents.length)) set("agent", agents[Number(key) - 1]);
  else if (key === "/") document.getElementById("find").focus();
  else return;
  event.preventDefault();
});

readState();
show();
