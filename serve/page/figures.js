// Speed, acceptance and the controller's belief as small charts. Each has its figures as text, too.

const SVG = "http://www.w3.org/2000/svg";
const percent = (share) => `${Math.round(100 * share)} %`;
const sigmoid = (z) => 1 / (1 + Math.exp(-z));

function make(tag, attributes = {}, text) {
  const element = tag === tag.toLowerCase() && ["svg", "path", "line", "text", "g"].includes(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
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

// `drafting` and `plain`: statistics of the two ways for one prompt, or null.
export function showSpeed(drafting, plain, verdict) {
  const most = Math.max(drafting?.tokens_per_second ?? 0, plain?.tokens_per_second ?? 0) || 1;
  const row = (name, stats, kind) => {
    const value = stats?.new_tokens ? `${stats.tokens_per_second.toFixed(1)} (${stats.tokens_per_round.toFixed(2)} a round)` : "not measured";
    return bar(name, (stats?.tokens_per_second ?? 0) / most, value, kind);
  };
  show("speed", [row("drafting", drafting, "exit"), row("plain", plain, "verify")], verdict);
}

export function showAcceptance(stats) {
  const judged = stats?.verified_at_depth ?? [];
  const rows = judged.slice(0, 12).flatMap((count, at) => {
    if (!count) return [];
    const share = stats.accepted_at_depth[at] / count;
    return [bar(`${at + 1}.`, share, `${percent(share)} of ${count}`, "exit")];
  });
  const total = stats?.draft_tokens ? `${stats.accepted_tokens} of ${stats.draft_tokens} draft tokens were accepted` : "";
  const copied = stats?.accepted_text_tokens ? `, ${stats.accepted_text_tokens} of them from the text` : "";
  show("acceptance", rows, rows.length ? `${total}${copied}.` : "Nothing has been drafted in this text.");
}

// The posterior of shift and slope (mean and covariance of the calibration) as chances, with two standard deviations.
function believed(state, predicted) {
  const z = Math.log(predicted / (1 - predicted));
  const [shift, slope] = state.mean;
  const [aa, as, , ss] = state.covariance;
  const deviation = Math.sqrt(Math.max(aa + 2 * z * as + z * z * ss, 0));
  return [-2, 0, 2].map((far) => sigmoid(shift + slope * z + far * deviation));
}

export function showBelief(learned) {
  const kinds = [["accept", "exit", "exit head"], ["text", "text", "from the text"]].filter(([name]) => learned?.[name]?.mean?.length >= 2);
  if (!kinds.length) {
    show("belief", [], "It has learned nothing yet.");
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
    const points = grid.map((x) => [x, ...believed(learned[name], x)]);
    const edge = [...points.map(([x, low]) => at(x, low)), ...points.map(([x, , , high]) => at(x, high)).reverse()];
    svg.append(make("path", { d: `M${edge.join("L")}Z`, class: `band ${kind}` }));
    svg.append(make("path", { d: `M${points.map(([x, , middle]) => at(x, middle)).join("L")}`, class: `curve ${kind}` }));
    const [low, middle, high] = believed(learned[name], 0.5);
    return `${title} ${percent(middle)} (${percent(low)} to ${percent(high)})`;
  });
  svg.append(make("text", { x: 8, y: 104 }, "0 %"), make("text", { x: 192, y: 104, "text-anchor": "end" }, "predicted 100 %"));
  svg.append(make("text", { x: 10, y: 15 }, "believed 100 %"));
  const words = `Where 50 % was predicted it now believes: ${said.join("; ")}.`;
  svg.setAttribute("aria-label", words);
  show("belief", [svg], `Chance that a draft token is accepted, against the chance predicted before; bands are two standard deviations. ${words}`);
}
