// One text with its tokens, coloured by who proposed them, and marks where drafts were rejected.

const WHO = { exit: "exit head", text: "text", verify: "verifier" };

export class Answer {
  constructor(output, title) {
    this.tokens = [];
    this.element = document.createElement("div");
    this.element.className = "answer";
    if (title) this.element.append(heading(title));
    this.body = document.createElement("span");
    this.body.className = "tokens";
    this.element.append(this.body);
    output.append(this.element);
  }

  get text() {
    return this.body.textContent;
  }

  add(event) {
    event.tokens.forEach((token, at) => {
      // The verifier's token took the place of what was rejected.
      if (token.source === "verify" && at === event.tokens.length - 1) this.#mark(event.rejected, token.text);
      this.tokens.push(token.id);
      const span = document.createElement("span");
      span.className = token.source;
      span.textContent = token.text;
      this.body.append(span);
    });
    if (event.held) this.body.append(event.held);
  }

  #mark(rejected, instead) {
    if (!rejected.length) return;
    const mark = document.createElement("button");
    mark.type = "button";
    mark.className = "mark";
    mark.tabIndex = document.querySelector("#output .mark") ? -1 : 0;
    const drafted = rejected.map(visible).join("");
    mark.setAttribute("aria-label", `Rejected: ${drafted}. The ${WHO.verify} wrote: ${visible(instead) || "nothing that shows yet"}.`);
    mark.dataset.drafted = drafted;
    mark.dataset.instead = visible(instead);
    this.body.append(mark);
  }
}

export function question(output, text) {
  const element = document.createElement("div");
  element.className = "question";
  element.append(heading("You"), document.createTextNode(text));
  output.append(element);
}

// The prompt in front of what continues it.
export function prefix(answer, text) {
  const span = document.createElement("span");
  span.className = "prompt";
  span.textContent = text;
  answer.element.insertBefore(span, answer.body);
}

// Shows what was rejected, at the mark that the pointer or the focus is on. One mark is in the order of Tab; arrow keys go on.
export function watchMarks(output, tip) {
  const show = (mark) => {
    tip.replaceChildren(part("Rejected", mark.dataset.drafted, "drafted"), part("Verifier", mark.dataset.instead || "…", "instead"));
    tip.hidden = false;
    const place = mark.getBoundingClientRect();
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    const above = place.top - tip.offsetHeight - 6;
    tip.style.left = `${Math.max(8, Math.min(place.left - 12, room))}px`;
    tip.style.top = `${above > 8 ? above : place.bottom + 6}px`;
  };
  const hide = () => (tip.hidden = true);
  const on = (event) => event.target.classList.contains("mark") && show(event.target);
  const follow = () => (document.activeElement?.matches("#output .mark:focus-visible") ? show(document.activeElement) : hide());
  output.addEventListener("pointerover", on);
  output.addEventListener("focusin", on);
  output.addEventListener("click", on);
  output.addEventListener("pointerout", hide);
  output.addEventListener("focusout", hide);
  document.addEventListener("scroll", follow, true);
  output.addEventListener("keydown", (event) => {
    const marks = [...output.querySelectorAll(".mark")];
    const at = marks.indexOf(event.target);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: marks.length - 1 }[event.key];
    if (at < 0 || to === undefined || !marks[to]) return;
    event.preventDefault();
    marks[at].tabIndex = -1;
    marks[to].tabIndex = 0;
    marks[to].focus();
  });
}

function heading(text) {
  const title = document.createElement("h3");
  title.textContent = text;
  return title;
}

function part(name, text, kind) {
  const span = document.createElement("span");
  const code = document.createElement("code");
  code.className = kind;
  code.textContent = text;
  span.append(`${name} `, code);
  return span;
}

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
