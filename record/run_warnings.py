"""The warnings on the page of a run, found in its logs."""

from __future__ import annotations

from record.run_logs import Run, counted, number

LARGE_CENTRE = 10.0  # as in record/recorder.py
SAMPLER_GAP = 1e-2  # in fp32 the log-probs of sampler and trainer differ only by rounding
LONG_SHARE = 0.05  # share of replies that reach their limit


def warnings_of(run: Run) -> list[str]:
    """Return what deserves attention, found in the logs."""
    found = []
    for name, count in run.damaged.items():
        if count:
            found.append(f"{counted(count, 'line')} of {name} cannot be read: left out.")
    if run.reward_fit.get("learned") is False:
        found.append("The step reward model is not clearly better than chance, so dense rewards mean little.")
    crashed = sum(number(line.get("crashed_episodes")) or 0 for line in run.lines)
    if crashed:
        found.append(f"The environment crashed in {counted(crashed, 'episode')}.")
    a = run.of("policy")
    empty = [line["update"] for line in a if line.get("replayed_episodes") == 0]
    if empty and len(empty) < len(a):
        found.append(
            f"The replay buffer gave nothing in {counted(len(empty), 'update')} of A; alpha was 0 there."
        )
    large = [line for line in a if (number(line.get("centre_max")) or 0) > LARGE_CENTRE]
    if large:
        most = max(large, key=lambda line: line["centre_max"])
        found.append(
            f"In {counted(len(large), 'update')} of A a replayed token had c = \u03c0_old/\u03c0_B above "
            f"{LARGE_CENTRE:g}, at most {most['centre_max']:.1f} in update {most['update']}. "
            "--max_centre leaves such tokens out."
        )
    flat = [line for line in a if line.get("zero_spread_groups") == 1 and run.config.get("algo") != "ppo"]
    if flat:
        found.append(
            f"In {counted(len(flat), 'update')} of A no group had any spread: no gradient of its own."
        )
    both = a + run.of("explorer")
    long = sum((number(line.get("truncated_replies")) or 0) > LONG_SHARE for line in both)
    if long:
        found.append(f"Over 5 % of the replies reached --max_new_tokens in {counted(long, 'update')}.")
    long = sum(number(line.get("token_limit_episodes")) or 0 for line in both)
    if long:
        found.append(f"{counted(long, 'training episode')} ended because of --max_prompt_tokens.")
    gap = max((number(line.get("sampler_gap_max")) or 0 for line in both), default=0)
    if gap > SAMPLER_GAP and run.config.get("dtype") == "float32":
        found.append(f"Log-probs of sampler and trainer differ by up to {gap:.2g}; see sampler_gap_max.")
    return found
