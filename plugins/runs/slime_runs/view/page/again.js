// A sample's buttons: generate it again with something changed, and score its group with another reward, again whenever
// the reward's file changes.

import { link, tell } from "./api.js";
import { h, number, table } from "./dom.js";
import { reward } from "./samples.js";

const PERIOD = 1500;
const kept = { reward: "" };

export function again(where, found, tokenView) {
  const place = Object.fromEntries(
    Object.entries({ ...where, rollout: Number(where.rollout), group: integer(where.group), sample: integer(where.sample), part: integer(where.part) }).filter(([, value]) => value !== null && value !== undefined && value !== ""),
  );
  return h("div", resampling(place, found, tokenView), scoring(place, found));
}

function integer(value) {
  return value === undefined || value === null || value === "" ? null : Number(value);
}

function field(title, attributes) {
  const input = h("input", { type: "number", min: 0, ...attributes });
  return [input, h("label", `${title} `, input)];
}

// A button that runs `work`; its errors are shown as text.
function button(word, waiting, out, work) {
  const made = h("button", {
    onclick: async () => {
      const began = Date.now();
      const clock = h("p.dim", { role: "status" }, `${waiting} ...`);
      const ticks = setInterval(() => clock.replaceChildren(`${waiting} ... ${Math.round((Date.now() - began) / 1000)} s`), 1000);
      made.disabled = true;
      out.replaceChildren(clock);
      try {
        out.replaceChildren(...[await work()].flat());
      } catch (error) {
        out.replaceChildren(h("pre.bad", { role: "alert" }, error.message));
      } finally {
        made.disabled = false;
        clearInterval(ticks);
      }
    },
  }, word);
  return made;
}

function resampling(place, found, tokenView) {
  const [from, fromLabel] = field("from token", { name: "from", value: 0, max: Math.max(0, found.response_tokens - 1), size: 5 });
  const [temperature, temperatureLabel] = field("temperature", { step: "any", placeholder: "as it was" });
  const [times, timesLabel] = field("times", { value: 1, min: 1, max: 16 });
  const weights = h("select", h("option", { value: "" }, "that sampled it"), found.kept_weights.map((step) => h("option", { value: step }, `after ${step} rollouts`)));
  const answer = h("textarea", { rows: 2, placeholder: "as it was" });
  const tool = found.tokens.spans.some(([source]) => source === "tool");
  const out = h("div");
  const go = button("resample", "the engine is started, which takes some seconds", out, async () => {
    const wish = {
      ...place, from_token: Number(from.value || 0), times: Number(times.value || 1), temperature: temperature.value === "" ? null : Number(temperature.value),
      weights: integer(weights.value), tool_answer: tool && answer.value ? answer.value : null,
    };
    return (await tell("resample", wish)).map((one, i) => outcome(one, i, found, tokenView));
  });
  return h("details.box", h("summary", "resample: generate it again"), h("div.controls", fromLabel, h("span.dim", "of the answer; the chosen one by a click on a token"), temperatureLabel, timesLabel, h("label", "weights ", weights), tool ? h("label", "answer of the tool ", answer) : null, go), out);
}

function outcome(one, i, found, tokenView) {
  const same = one.first_difference === null;
  const bits = one.log_prob_distance === 0 ? "log-probs bit for bit" : `log-probs within ${number(one.log_prob_distance, 2)}`;
  const words = same ? `the same tokens, ${bits}` : `the same up to token ${one.first_difference}, ${bits} so far`;
  const view = tokenView(one.tokens, () => {});
  const first = one.first_difference === null ? -1 : one.tokens.prompt - one.tokens.start + one.first_difference;
  view.spans[first]?.classList.add("differs");
  return h("div.card",
    h("p", h("b", `${i + 1}: `), words, h("span.dim", `; reward ${same ? "" : `${number(found.score)} → `}`), reward(one.reward), h("span.dim", `; ${one.status}; weights after ${one.weights.step} rollouts, ${one.kept} tokens kept`)),
    view.holder,
  );
}

function scoring(place, found) {
  const spec = h("input", { placeholder: "reward.py, reward.py:name or a plugin", size: 34, value: kept.reward, "aria-label": "reward", onchange: () => (kept.reward = spec.value) });
  const live = h("input", { type: "checkbox", onchange: () => live.checked && follow() });
  const out = h("div");
  let seen = null;
  async function scored() {
    const told = await tell("score", { ...place, reward: spec.value, seen });
    seen = told.state;
    return told.unchanged ? null : scores(told.outcomes, place);
  }
  const go = button("score again", "scoring", out, () => ((seen = null), scored()));
  async function follow() {
    while (live.checked && live.isConnected) {
      try {
        const made = !go.disabled && spec.value ? await scored() : null;
        if (made) out.replaceChildren(made);
      } catch (error) {
        out.replaceChildren(h("pre.bad", { role: "alert" }, error.message));
      }
      await new Promise((done) => setTimeout(done, PERIOD));
    }
  }
  return h("details.box", h("summary", "score again: what another reward would give this group"), h("div.controls", spec, go, h("label", live, " again whenever the file changes")), out);
}

function scores(outcomes, place) {
  const rows = outcomes.map((one) => {
    const address = link("sample", { ...place, sample: one.sample_index });
    const changed = one.error !== null || JSON.stringify(one.old) !== JSON.stringify(one.new);
    return [h("a", { href: address }, one.sample_index), h("div", reward(one.old)), h(changed ? "b" : "div", one.error === null ? reward(one.new) : h("span.bad", one.error)), h("div.start", one.answer)];
  });
  const mean = (name) => number(outcomes.reduce((sum, one) => sum + (typeof one[name] === "number" ? one[name] : 0), 0) / (outcomes.length || 1));
  return h("div", table(["sample", "reward was", "reward would be", "answer"], rows), h("p.dim", `on average ${mean("old")} → ${mean("new")}; ${outcomes.filter((one) => one.error !== null).length} failed`));
}
