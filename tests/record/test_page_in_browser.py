"""The page in a real headless browser: Chromium, driven by playwright. Without them it is skipped."""

import shutil

import pytest
from made_run import episode, episodes, make_run, metrics

from record import report
from record.page import write_page

pytestmark = pytest.mark.slow
sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install -r requirements/browser.txt"
)
NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
if CHROMIUM is None:
    pytest.skip("there is no Chromium: apt-get install chromium", allow_module_level=True)

EVIL = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    evil = episode("evaluation", 4, False, (None,), task="evil")
    evil["steps"][0] |= {"observation": EVIL, "reply": EVIL, "action": "", "valid": False}
    looks = episode("explorer", 3, True, (0.1, 0.1), task="look at it", task_type="Look")
    found = [*episodes(), evil, looks]
    return write_page(make_run(tmp_path_factory.mktemp("run"), transcripts=found))


@pytest.fixture
def opened(browser, page_file):
    """Return a function that opens the page, or another file. Afterwards nothing may have gone wrong."""
    faults, contexts = [], []

    def opened(path=page_file, width=1200, scheme="light", query=""):
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: faults.append(dialog.message))
        page.on("request", lambda request: request.url.startswith("file:") or faults.append(request.url))
        page.goto(path.as_uri() + query)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [fault for fault in faults if not fault.startswith("data:")] == []


def state(page):
    """Return (agent, stage, solved counter, unsolved counter) as the page shows them."""
    pressed = [button.inner_text() for button in page.query_selector_all("[aria-pressed=true]")]
    counters = [counter.inner_text() for counter in page.query_selector_all(".pager span")]
    return (*pressed, *counters)


def press(page, *keys):
    for key in keys:
        page.keyboard.press(key)
    return state(page)


def test_the_largest_disagreement_of_b_comes_first(opened):
    page = opened()
    assert state(page) == ("B", "whole run", "1 of 5", "1 of 4")
    chips = [chip.inner_text() for chip in page.query_selector_all("#solved .chip")]
    assert {"dense reward +0.20", "outcome 1", "update 3", "Look"} <= set(chips)
    chips = [chip.inner_text() for chip in page.query_selector_all("#failed .chip")]
    assert {"dense reward +1.60", "outcome 0", "update 0, loop 1"} <= set(chips)
    bars = page.eval_on_selector_all("#failed .score i", "bars => bars.map((bar) => bar.style.width)")
    assert bars == ["50%", "50%"]  # 0.8 is the largest score of the page: half of the width
    assert press(page, "d") == ("B", "whole run", "1 of 5", "1 of 4")  # in order of updates
    assert "update 0, loop 1" in page.inner_text("#solved") and "dense reward +1.60" in page.inner_text(
        "#solved"
    )


def test_keys(opened):
    page = opened()
    assert press(page, "ArrowRight", "ArrowRight") == ("B", "whole run", "3 of 5", "3 of 4")
    assert press(page, "ArrowLeft", "j", "p", "p") == ("B", "whole run", "3 of 5", "1 of 4")
    assert press(page, "k", "k", "k", "n") == ("B", "whole run", "1 of 5", "2 of 4")
    assert press(page, "e") == ("B", "end", "1 of 1", "none")  # update 3 of 4
    assert press(page, "m", "s", "w") == ("B", "whole run", "1 of 5", "1 of 4")
    assert press(page, "3") == ("replayed", "whole run", "1 of 1", "none")
    assert press(page, "4") == ("A, panel", "whole run", "1 of 1", "1 of 2")
    assert press(page, "9") == ("A, panel", "whole run", "1 of 1", "1 of 2")
    assert press(page, "1", "/", "l", "o", "o", "k") == ("B", "whole run", "1 of 1", "none")
    assert press(page, "Escape", "2") == ("A", "whole run", "none", "none")  # no episode of A has this text


def test_filters_and_buttons(opened):
    page = opened()
    page.select_option("#type", "Look")
    assert state(page) == ("B", "whole run", "1 of 1", "none")
    page.select_option("#type", "")
    page.click("#failed button[aria-label='next episode']")
    assert state(page) == ("B", "whole run", "1 of 5", "2 of 4")
    page.click("[data-agent=replayed]")
    assert page.is_hidden("#order")  # there is no dense reward
    chips = [chip.inner_text() for chip in page.query_selector_all("#solved .chip")]
    assert {"advantage +1.50", "age 1", "centre 1.00", "ratio 2.00"} <= set(chips)
    page.click("[data-stage=middle]")
    assert state(page) == ("replayed", "middle", "1 of 1", "none")
    page.reload()
    assert state(page) == ("replayed", "middle", "1 of 1", "none")


def test_markup_in_an_episode_shows_as_text(opened):
    page = opened()
    assert press(page, "4", "n")[3] == "2 of 2"
    assert page.inner_text("#failed .observation") == page.inner_text("#failed .reply") == EVIL
    assert page.inner_text("#failed .action") == "invalid reply"
    assert page.title() == "rspo + grpo on household, seed 0" and not page.query_selector_all("img")


def brightness(colour):
    """Return the sum of the parts of a colour such as "rgb(34, 37, 42)"."""
    return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))


@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_wide_and_narrow(opened, width, scheme):
    page = opened(width=width, scheme=scheme)
    style = "getComputedStyle(document.body)"
    ink, paper = page.evaluate(f"[{style}.color, {style}.backgroundColor]")
    dark, light = sorted([brightness(ink), brightness(paper)])
    assert (brightness(ink) == dark) == (scheme == "light") and light - dark > 400
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # nothing sticks out
    tops = [page.query_selector(name).bounding_box()["y"] for name in ("#solved", "#failed")]
    assert (tops[0] == tops[1]) == (width == 1200)  # side by side, or one below the other
    texts = page.eval_on_selector_all("svg text", "all => all.map((text) => getComputedStyle(text).fill)")
    assert texts and set(texts) == {ink}  # the charts have the page's colour


def test_the_page_of_several_runs(opened, tmp_path):
    folders = [make_run(tmp_path / f"s{seed}", metrics(seed), [], seed=seed) for seed in (1, 2)]
    page, _ = tmp_path / "report.html", report.several_runs(folders, tmp_path / "report.html")
    shown = opened(page)
    assert shown.inner_text("h1") == "2 runs in 1 group"
    assert "41.5 \u00b1 0.7" in shown.inner_text("#table") and shown.query_selector_all("svg")
