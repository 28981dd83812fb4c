"""The page of `slime view` in Chromium: two clicks to a token, every page, keys, filters, live runs, hostile text.

The walk through all pages looks for findings of axe-core (https://github.com/dequelabs/axe-core), which `make
view-assets` installs, and takes a picture of each page, which `make screenshots` keeps.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from slime_runs.index import Filter
from slime_runs.run import Run
from slime_runs.view import server
from slime_serving.http.application import bind, listen

from slime_core.cli.main import main
from tests.conftest import TinyRun
from tests.front_servers import in_thread
from tests.made_run import MadeRun

NASTY = (
    "<script>window.owned = 1</script><img src=x onerror='window.owned = 1'>",
    "a\x1b[2J\u202egnp.exe\u2066b",
    "y" * 1_000_000,
)
AXE = server.HERE.parents[1] / "node_modules" / "axe-core" / "axe.min.js"
HEIGHT, WIDE, NARROW, WIDEST = 860, 1280, 390, 2560
_AUTOFOCUS = "Autofocus processing was blocked"  # what Chromium says of an address with a fragment


def serve(path: Path) -> Callable[[], Awaitable[Any]]:
    async def started() -> Any:
        return await listen(server.make_app(path), bind("127.0.0.1", 0))

    return started


@pytest.fixture(scope="module")
def run_dir(browser: Any, tiny: TinyRun, slime: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if given := os.environ.get("SLIME_TEST_VIEW_RUN"):
        return Path(given)
    save = tmp_path_factory.mktemp("seen") / "run"
    slime("train", *tiny.argv(save, num_rollout=3, eval_interval=1))
    return save


@pytest.fixture(scope="module")
def url(run_dir: Path) -> Iterator[str]:
    with in_thread(serve(run_dir)) as found:
        yield found


@contextmanager
def page_of(browser: Any, **options: Any) -> Iterator[Any]:
    """A page; what it says on its console, and what it throws, fails the test."""
    context = browser.new_context(viewport={"width": WIDE, "height": HEIGHT}, **options)
    page, said = context.new_page(), []
    page.on("console", lambda message: _AUTOFOCUS not in message.text and said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(f"dialog {dialog.message}"))
    yield page
    context.close()
    assert said == []


def shows(page: Any, name: str) -> None:
    page.wait_for_selector(f"main[data-ready={name}]", timeout=30_000)


def found_by_axe(page: Any) -> list[str]:
    """Return the findings of axe-core that are serious or critical, each with its first elements."""
    if not AXE.is_file():
        if os.environ.get("SLIME_TEST_BROWSER") == "required":
            pytest.fail(f"{AXE} is missing: make view-assets")
        return []
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [
        f"{one['id']} ({one['impact']}): " + "; ".join(node["html"][:160] for node in one["nodes"][:3])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def test_two_clicks_to_this_token_this_log_prob_this_reward(browser: Any, url: str) -> None:
    with page_of(browser) as page:
        page.goto(url)
        shows(page, "run")
        page.locator("td a[href*='#/sample?']").first.click()
        shows(page, "sample")
        page.locator(".tokens .s-sampled").nth(2).click()
        panel = page.locator(".panel")
        facts = dict(zip(panel.locator("dt").all_inner_texts(), panel.locator("dd").all_inner_texts()))
        assert facts["written by"] == "model"
        assert float(facts["log-prob, engine"]) < 0
        assert float(facts["log-prob, trainer"]) == pytest.approx(float(facts["log-prob, engine"]), abs=1e-3)
        assert float(facts["ratio"]) == pytest.approx(1, abs=1e-3)
        assert float(facts["reward"]) >= 0
        assert re.search(r"[0-9a-f]{12}", facts["reward function"])


@pytest.mark.parametrize("scheme", [pytest.param("light", marks=pytest.mark.slow), "dark"])
def test_every_page_in_light_and_dark(browser: Any, url: str, run_dir: Path, tmp_path: Path, scheme: str) -> None:
    run = Run(run_dir)
    entry = next(run.samples(Filter(data_set=""), order="worst", limit=1)).entry
    data_set = run.index().evaluations()[0].data_set
    place = f"rollout={entry.rollout}&run=."
    pages = {
        "runs": "#/runs", "run": "#/run?run=.", "rollout": f"#/rollout?{place}",
        "group": f"#/group?{place}&group={entry.group_index}",
        "sample": f"#/sample?{place}&group={entry.group_index}&sample={entry.sample_index}",
        "timeline": f"#/timeline?{place}", "evaluation": f"#/evaluation?run=.&data_set={data_set}",
        "prompt": f"#/prompt?run=.&row={entry.data_row}", "samples": "#/samples?run=.&what=best",
        "compare": "#/compare?run=.&run=.", "shadows": "#/shadows?run=.",
    }  # fmt: skip
    pictures = Path(os.environ.get("SLIME_TEST_SCREENSHOTS", tmp_path))
    with page_of(browser, color_scheme=scheme) as page:
        for name, address in pages.items():
            page.goto(f"{url}/{address}")
            shows(page, name)
            page.wait_for_load_state("networkidle")  # rows get their texts when they are drawn
            if name == "run":
                page.locator(".chart :is(canvas, svg)").first.wait_for()
            assert page.locator("main [role=alert]").count() == 0
            assert page.locator("main").inner_text().strip()
            if name == "sample":
                page.get_by_label("colour by").select_option("advantage")
            for width, of in ((WIDE, ""), (NARROW, "-390"), *[(WIDEST, "-2560")] * (name in ("run", "group"))):
                page.set_viewport_size({"width": width, "height": HEIGHT})
                if width == WIDE or (width == NARROW and scheme == "light"):  # axe takes a third of a second
                    assert found_by_axe(page) == [], f"{name} at {width} px"
                picture = pictures / f"{name}{of}{'-dark' * (scheme == 'dark')}.png"
                page.screenshot(path=picture)
                assert int.from_bytes(picture.read_bytes()[16:20]) == width  # where a PNG has it
                beside = page.evaluate("document.documentElement.scrollWidth - innerWidth")
                assert beside <= 0, f"{name} at {width} px: {beside} px lie beside the window"
            page.set_viewport_size({"width": WIDE, "height": HEIGHT})
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (int(re.findall(r"\d+", back)[0]) < 60) == (scheme == "dark")


def test_keys_walk_from_the_run_to_tokens_and_back(browser: Any, url: str) -> None:
    with page_of(browser) as page:
        page.goto(url)
        shows(page, "run")
        page.keyboard.press("?")
        assert page.locator("dialog[open]").is_visible()
        page.keyboard.press("Escape")
        page.locator("dialog[open]").wait_for(state="detached")  # keys before that are the dialog's
        for key in ("j", "Enter"):  # the newest rollout
            page.keyboard.press(key)
        shows(page, "rollout")
        for key in ("j", "j", "Enter"):
            page.keyboard.press(key)
        shows(page, "sample")
        first = page.locator("h1").inner_text()
        page.keyboard.press("j")
        page.locator("h1", has_not_text=first).wait_for()
        page.keyboard.press("k")
        page.locator("h1", has_text=first).wait_for()
        for template in (False, True, False):
            assert page.locator(".tokens .s-template").first.is_visible() == template
            page.keyboard.press("t")
        page.keyboard.press("t")
        chosen = page.locator(".tokens .chosen")
        at = int(chosen.get_attribute("data-i"))
        page.keyboard.press("l")
        assert int(chosen.get_attribute("data-i")) == at + 1
        page.keyboard.press("u")
        shows(page, "group")
        page.keyboard.press("u")
        shows(page, "rollout")
        rows = page.locator("tr.row", has=page.locator("td.start:not(:empty)"))
        said = rows.first.locator("td.start").first.inner_text().split()[0]
        page.keyboard.press("/")
        page.keyboard.type("no answer has this")
        page.keyboard.press("Enter")
        page.get_by_text(re.compile(r"^0 of \d+ samples")).wait_for()
        page.keyboard.press("Escape")
        page.locator("[data-search]").fill(said)
        page.keyboard.press("Enter")
        page.get_by_text(re.compile(r"^[1-9]\d* of \d+ samples")).wait_for()
        assert page.locator("td.start mark").first.inner_text() == said
        page.keyboard.press("Escape")
        page.keyboard.press("[")
        shows(page, "rollout")


@pytest.mark.slow
def test_another_reward_scores_the_group_and_again_when_its_file_changes(
    browser: Any, url: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def reward(args, sample):\n    return 7.25\n")
    with page_of(browser) as page:
        page.goto(url)
        shows(page, "run")
        page.locator("td a[href*='#/sample?']").first.click()
        shows(page, "sample")
        page.get_by_text("score again: what").click()
        page.get_by_label("reward", exact=True).fill(str(file))
        page.get_by_role("button", name="score again").click()
        page.get_by_role("cell", name="7.25").first.wait_for(timeout=60_000)
        page.get_by_label("again whenever the file changes").check()
        file.write_text("def reward(args, sample):\n    raise ValueError('<b>not</b> this')\n")
        page.get_by_text("<b>not</b> this").first.wait_for(timeout=60_000)


@pytest.mark.slow
def test_a_sample_is_generated_again_from_its_page(browser: Any, url: str) -> None:
    with page_of(browser) as page:
        page.goto(f"{url}/#/sample?run=.&rollout=0")
        shows(page, "sample")
        page.get_by_text("resample: generate it again").click()
        page.locator(".tokens .s-sampled").nth(1).click()
        assert page.locator("input[name=from]").input_value() == "1"
        page.get_by_label("times").fill("2")
        page.get_by_role("button", name="resample").click()
        page.get_by_text("2:").wait_for(timeout=200_000)
        assert page.locator(".card .tokens").count() == 2


@pytest.mark.slow
def test_a_timeline_has_engine_tools_rewards_trainer_and_waits_apart(browser: Any, tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run", rollouts=1).write()
    with in_thread(serve(run)) as url, page_of(browser) as page:
        page.goto(f"{url}/#/timeline?run=.&rollout=0")
        shows(page, "timeline")
        rows = page.locator("tbody tr").all_inner_texts()
        seconds = {row.split("\t")[0].strip(): row.split("\t")[2] for row in rows}
        assert seconds == {
            "rollout": "6 s", "queued": "200 ms", "engine": "56.4 s", "tools": "6 s", "rewards": "16 s",
            "trainer": "3 s", "sync": "100 ms", "trainer waits": "6 s",
        }  # fmt: skip


@pytest.mark.slow
def test_smoothing_and_zoom_of_the_built_page(browser: Any, url: str) -> None:
    if server.static_folder().name != "built":
        pytest.skip("the page is not built: make view-assets")
    with page_of(browser) as page:
        page.goto(url)
        shows(page, "run")
        page.locator(".chart .uplot").first.wait_for()
        page.get_by_label("smoothing").fill("0.6")
        over = page.locator(".chart .u-over").first
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        before = page.locator(".chart").first.screenshot()
        page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 30)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 30, steps=4)
        page.mouse.up()
        page.mouse.move(2, 2)
        assert page.locator(".chart").first.screenshot() != before
        assert "#/run" in page.url


def test_runs_are_grouped_by_a_setting_and_compared(browser: Any, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1), ("c", 1)):
        MadeRun(tmp_path / name, seed=seed, rollouts=2).write()
    lines = (tmp_path / "a" / "metrics.jsonl").read_text().replace("eval/held", "train/unnamed")
    (tmp_path / "a" / "metrics.jsonl").write_text(lines)
    with in_thread(serve(tmp_path)) as url, page_of(browser) as page:
        page.goto(url)
        shows(page, "runs")
        page.locator("select").select_option("seed")
        page.locator("h2", has_text="seed: 1").wait_for()
        assert page.locator("h2").all_inner_texts()[1].startswith("seed: 1 2 runs, last reward")
        for name in ("a", "c"):
            page.get_by_label(f"compare {name}").check()
        page.get_by_role("button", name="compare").click()
        shows(page, "compare")
        page.locator(".chart :is(canvas, svg)").first.wait_for()
        assert page.get_by_text("within noise").or_(page.get_by_text("the noise is not known")).count() > 0
        assert page.get_by_text("means of rollouts 1 to 2, the last that all have").count() == 1
        evaluation = page.locator("figure", has_text="Held-out: held")
        if server.static_folder().name != "built":  # there curves are drawn on a canvas
            assert evaluation.locator("polyline.c1").count() == 1
            assert evaluation.locator("polyline.c0").count() == 0  # the colour of a, which was not evaluated


def test_a_run_is_laid_over_another_and_drawn_over_wall_time(browser: Any, tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        MadeRun(tmp_path / name, seed=seed, rollouts=2).write()
    with in_thread(serve(tmp_path)) as url, page_of(browser) as page:
        page.set_viewport_size({"width": NARROW, "height": HEIGHT})
        page.goto(f"{url}/#/runs")
        shows(page, "runs")
        page.get_by_role("button", name="Menu").click()
        page.get_by_role("navigation", name="runs and pages").get_by_role("link", name="stopped, a").click()
        shows(page, "run")
        reward = page.get_by_role("img", name=re.compile("^Reward: "))
        assert re.fullmatch(r"Reward: 3 values, first \S+, last \S+", reward.get_attribute("aria-label"))
        page.get_by_label("lay a run over").select_option("b")
        page.get_by_role("img", name=re.compile("^Reward: a 3 values.*; b 3 values")).wait_for()
        page.get_by_label("horizontal axis").select_option("time")
        page.locator(".chart", has_text="seconds").or_(page.locator(".plot canvas")).first.wait_for()
        page.get_by_role("button", name="remove b").click()
        page.get_by_role("img", name=re.compile("^Reward: 3 values")).wait_for()
        page.get_by_label("horizontal axis").select_option("rollout")


@pytest.mark.slow
def test_a_note_is_written_on_the_page_and_shown_in_the_list(browser: Any, tmp_path: Path) -> None:
    for name in "ab":
        MadeRun(tmp_path / name, rollouts=1).write()
    with in_thread(serve(tmp_path)) as url, page_of(browser) as page:
        page.goto(f"{url}/#/run?run=a")
        shows(page, "run")
        page.get_by_label("Note").fill("half the rate <b>of</b> b")
        page.get_by_role("button", name="Save").click()
        page.get_by_text("saved").wait_for()
        assert found_by_axe(page) == []
        page.goto(f"{url}/#/runs")
        shows(page, "runs")
        assert page.locator("td.title .note").all_inner_texts() == ["half the rate <b>of</b> b"]


def test_what_a_model_wrote_is_shown_as_text(browser: Any, tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run", texts=NASTY, rollouts=1).write()
    (run / "checkpoints" / "rollout_0000000").mkdir(exist_ok=True)
    with in_thread(serve(run)) as url, page_of(browser) as page:
        page.goto(f"{url}/#/group?run=.&rollout=0&group=0")
        shows(page, "group")
        texts = page.locator(".card .text").all_text_contents()
        assert {NASTY[0], r"a\x1b[2J\u202egnp.exe\u2066b"} <= set(texts)
        assert [text for text in texts if text.endswith("characters more)")]
        page.goto(f"{url}/#/sample?run=.&rollout=0&group=0&sample=0")
        shows(page, "sample")
        assert page.locator("main script, main img").count() == 0
        assert page.evaluate("window.owned") is None


def test_a_name_is_shown_as_text(browser: Any, tmp_path: Path) -> None:
    name = NASTY[1] + NASTY[0].replace("/", "")
    run = MadeRun(tmp_path / name, rollouts=1).write()
    (run / "incidents.jsonl").write_text(json.dumps({"rollout_id": 0, "cause": name, "numbers": {"onclick": name}}))
    with in_thread(serve(tmp_path)) as url, page_of(browser) as page:
        page.goto(f"{url}/#/runs")
        shows(page, "runs")
        page.locator("td a", has_text="egnp").first.click()
        shows(page, "run")
        spelled = NASTY[1].replace("\x1b", r"\x1b").replace("\u202e", r"\u202e").replace("\u2066", r"\u2066")
        assert page.locator("td", has_text='{"onclick":').count() == 1
        for text in (page.title(), page.locator("main").inner_text(), page.locator("header").inner_text()):
            assert spelled in text
            assert not {"\x1b", "\u202e", "\u2066"} & set(text)
        assert page.evaluate("window.owned") is None


@pytest.mark.slow
def test_a_live_run_is_followed_without_a_click(browser: Any, tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run", rollouts=2).write()
    with in_thread(serve(run)) as url, page_of(browser) as page:
        page.goto(url)
        page.get_by_text("2 of 2 rollouts").wait_for()
        page.locator("summary", has_text="settings").click()
        MadeRun(run, rollouts=5).write()
        page.get_by_text("5 of 5 rollouts").wait_for(timeout=30_000)
        page.locator("tr.row", has_text="4").first.wait_for()
        assert page.get_by_role("cell", name="hf_checkpoint").is_visible(), "what was opened stays open"
        assert "null" not in page.locator("main").inner_text()


@pytest.mark.parametrize(
    ("folder", "curve"), [pytest.param("built", ".chart .uplot", marks=pytest.mark.slow), ("page", ".chart svg.sketch")]
)
def test_a_report_is_read_without_a_server(
    browser: Any, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, curve: str
) -> None:
    if folder == "built" and server.static_folder().name != "built":
        pytest.skip("the page is not built: make view-assets")
    monkeypatch.setattr(server, "static_folder", lambda: server.HERE / folder)
    assert main(["report", str(run_dir), "--output", str(tmp_path / "report.html"), "--rollouts", "1"]) == 0
    with page_of(browser) as page:
        page.goto((tmp_path / "report.html").as_uri())
        shows(page, "run")
        page.locator(curve).first.wait_for()
        page.locator("tr.row a[href*='#/rollout?']").first.click()
        shows(page, "rollout")
        assert page.locator("td.start").first.inner_text()
        page.locator("tr.row a[href*='#/sample?']").last.click()
        page.locator("main[data-ready=sample] .tokens").wait_for()
