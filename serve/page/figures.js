// Small charts of speed, tokens per round, acceptance and the controller's estimate. Each also has its figures as text.

const SVG = "http://www.w3.org/2000/svg";
const KINDS = ["exit", "text", "verify"];
const FEWEST = 5; // minimum number of samples of a position that is shown
const MOST_BARS = 64;
const percent = (share) => `${Math.round(100 * share)} %`;
const sigmoid = (z) => 1 / (1 + Math.exp(-z));
const sum = (values) => values.reduce((total, value) => total + value, 0);

function make(tag, attributes = {}, text) {
  const drawn = ["svg", "path", "line", "rect", "text"].includes(tag);
  const element = drawn ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function bar(name, share, value, kind) {
  const row = make("div", { class: "bar" });
  const track = make("span", { class: "track", "aria-hidden": "true" });
  const fill = make("span", { class: `fill ${kind}` });
  fill.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  track.append(fill);
  row.append(make("span", { class: "name" }, name), track, make("span", { class: "value" }, value));
  return row;
}

function show(id, elements, note) {
  const figure = document.getElementById(id);
  figure.querySelector(".chart").replaceChildren(...elements);
  figure.querySelector(".note").textContent = note;
}

// `drafting` and `plain`: statistics of a prompt with and without drafting, or undefined.
export function showSpeed(drafting, plain, verdict) {
  const most = Math.max(drafting?.tokens_per_second ?? 0, plain?.tokens_per_second ?? 0) || 1;
  const row = (name, stats, kind) => {
    const value = stats?.new_tokens ? `${stats.tokens_per_second.toFixed(1)} (${stats.tokens_per_round.toFixed(2)} a round)` : "not measured";
    return bar(name, (stats?.tokens_per_second ?? 0) / most, value, kind);
  };
  show("speed", [row("drafting", drafting, "exit"), row("plain", plain, "verify")], verdict);
}

// `rounds`: the tokens of each round, by source. For long texts, a bar is the mean of several rounds.
export function showRounds(rounds) {
  if (!rounds?.length) {
    show("rounds", [], "There is no text yet.");
    return;
  }
  const each = Math.ceil(rounds.length / MOST_BARS);
  const bars = Array.from({ length: Math.ceil(rounds.length / each) }, (_, at) => {
    const some = rounds.slice(at * each, (at + 1) * each);
    return KINDS.map((kind) => sum(some.map((round) => round[kind])) / some.length);
  });
  const total = sum(rounds.map((round) => sum(Object.values(round))));
  const highest = Math.max(...bars.map(sum));
  const width = 188 / Math.max(bars.length, 12);
  const svg = make("svg", { viewBox: "0 0 200 66", role: "img" });
  bars.forEach((counts, at) => {
    let y = 54;
    counts.forEach((count, kind) => {
      const height = (46 * count) / highest;
      y -= height;
      svg.append(make("rect", { x: 10 + at * width, y, width: width * 0.85, height, class: KINDS[kind] }));
    });
  });
  svg.append(make("line", { x1: 10, x2: 198, y1: 54, y2: 54, class: "grid" }));
  svg.append(make("text", { x: 0, y: 13 }, String(Math.round(highest))), make("text", { x: 10, y: 62 }, "first round"));
  svg.append(make("text", { x: 198, y: 62, "text-anchor": "end" }, each > 1 ? `round ${rounds.length}; a bar is ${each} rounds` : `round ${rounds.length}`));
  const words = `${(total / rounds.length).toFixed(2)} tokens a round on average, over ${rounds.length} rounds.`;
  svg.setAttribute("aria-label", words);
  show("rounds", [svg], words);
}

export function showAcceptance(stats) {
  const judged = stats?.verified_at_depth ?? [];
  let hidden = 0;
  const rows = [
    ["exit", "head", (at) => [stats.accepted_at_depth[at] - stats.text_accepted_at_depth[at], judged[at] - stats.text_verified_at_depth[at]]],
    ["text", "text", (at) => [stats.text_accepted_at_depth[at], stats.text_verified_at_depth[at]]],
  ].flatMap(([kind, name, counts]) =>
    judged.slice(0, 12).flatMap((_, at) => {
      const [accepted, count] = counts(at);
      hidden += count > 0 && count < FEWEST ? 1 : 0;
      return count < FEWEST ? [] : [bar(`${name} ${at + 1}`, accepted / count, `${percent(accepted / count)} of ${count}`, kind)];
    }),
  );
  if (!stats?.draft_tokens) {
    show("acceptance", [], "Nothing has been drafted in this text.");
    return;
  }
  const copied = stats.accepted_text_tokens ? `, ${stats.accepted_text_tokens} of them from the text` : "";
  const few = hidden ? ` Positions with fewer than ${FEWEST} samples are hidden.` : "";
  show("acceptance", rows, `${stats.accepted_tokens} of ${stats.draft_tokens} draft tokens were accepted${copied}.${few}`);
}

// The posterior of shift and slope, and of the text's offset, as chances with two standard deviations on either side.
function estimates(state, predicted, alone) {
  const z = Math.log(predicted / (1 - predicted));
  const [shift, slope, offset] = state.mean;
  const [aa, as, ab, ss, sb, bb] = state.covariance;
  const ofText = alone ? bb + 2 * (ab + z * sb) : 0;
  const deviation = Math.sqrt(Math.max(aa + 2 * z * as + z * z * ss + ofText, 0));
  const middle = shift + slope * z + (alone ? offset : 0);
  return [-2, 0, 2].map((far) => sigmoid(middle + far * deviation));
}

export function showEstimate(learned) {
  const kinds = [["accept", "exit", "exit head"], ["text", "text", "from the text"]].filter(([name]) => learned?.[name]);
  if (!kinds.length) {
    show("estimate", [], "It has learned nothing yet.");
    return;
  }
  const at = (x, y) => `${(8 + 184 * x).toFixed(1)} ${(92 - 84 * y).toFixed(1)}`;
  const grid = Array.from({ length: 49 }, (_, i) => 0.02 + (0.96 * i) / 48);
  const svg = make("svg", { viewBox: "0 0 200 112", role: "img" });
  for (const share of [0, 0.5, 1]) {
    const [y, x] = [92 - 84 * share, 8 + 184 * share];
    svg.append(make("line", { x1: 8, x2: 192, y1: y, y2: y, class: "grid" }), make("line", { x1: x, x2: x, y1: 8, y2: 92, class: "grid" }));
  }
  svg.append(make("path", { d: `M${at(0, 0)}L${at(1, 1)}`, class: "prior" }));
  const said = kinds.map(([name, kind, title]) => {
    const points = grid.map((x) => [x, ...estimates(learned[name], x, learned.alone)]);
    const edge = [...points.map(([x, low]) => at(x, low)), ...points.map(([x, , , high]) => at(x, high)).reverse()];
    svg.append(make("path", { d: `M${edge.join("L")}Z`, class: `band ${kind}` }));
    svg.append(make("path", { d: `M${points.map(([x, , middle]) => at(x, middle)).join("L")}`, class: `curve ${kind}` }));
    const [low, middle, high] = estimates(learned[name], 0.5, learned.alone);
    return `${title} ${percent(middle)} (${percent(low)} to ${percent(high)})`;
  });
  svg.append(make("text", { x: 8, y: 104 }, "0 %"), make("text", { x: 192, y: 104, "text-anchor": "end" }, "predicted 100 %"));
  svg.append(make("text", { x: 10, y: 15 }, "estimated 100 %"));
  const where = learned.alone ? "for this text" : "for all requests of the batch";
  const words = `Estimates ${where} where 50 % was predicted: ${said.join("; ")}.`;
  svg.setAttribute("aria-label", words);
  show("estimate", [svg], `Chance that a draft token is accepted, against the prediction before any text. Bands: two standard deviations. ${words}`);
}
