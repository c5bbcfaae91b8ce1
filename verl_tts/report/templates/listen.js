// The state is what the listener has done, and is stored after each thing done: a reload changes nothing.
const test = JSON.parse(document.getElementById("test").textContent);
const place = `verl_tts.listen.${test.page}`;
const element = (id) => document.getElementById(id);
const sides = ["first", "second"];
const empty = { listener: "", started: null, at: 0, answers: {} };
const state = { ...structuredClone(empty), ...load() };
let shown = 0;

function load() {
  try {
    return JSON.parse(localStorage.getItem(place)) || {};
  } catch {
    return {};
  }
}

function store() {
  try {
    localStorage.setItem(place, JSON.stringify(state));
  } catch {
    // A browser that stores nothing for files: the test works, but not over a reload.
  }
}

function answerOf(pair) {
  state.answers[pair.id] ??= { choice: null, plays: { first: 0, second: 0 }, heard: { first: 0, second: 0 }, seconds: 0 };
  return state.answers[pair.id];
}

function view(name) {
  for (const id of ["begin", "pair", "end"]) element(id).hidden = id !== name;
  window.scrollTo(0, 0);
}

function showPair() {
  stop();
  const pair = test.pairs[state.at];
  const answer = answerOf(pair);
  element("count").textContent = `${state.at + 1} of ${test.pairs.length}`;
  element("progress").value = Object.values(state.answers).filter((one) => one.choice).length;
  element("text").textContent = pair.text;
  for (const side of sides) element(`play-${side}`).dataset.clip = pair[side];
  for (const button of element("choices").querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String(button.dataset.choice === answer.choice));
  }
  element("back").disabled = state.at === 0;
  shown = Date.now();
  unlock();
  view("pair");
}

function unlock() {
  const { heard } = answerOf(test.pairs[state.at]);
  element("choices").disabled = !(heard.first && heard.second);
  element("hint").style.visibility = element("choices").disabled ? "visible" : "hidden";
  for (const side of sides) element(`play-${side}`).classList.toggle("heard", heard[side] > 0);
}

// The seconds that a pair has been in front of the listener; whatever happens adds what has passed.
function clock(answer) {
  const now = Date.now();
  answer.seconds = Math.round(10 * answer.seconds + (now - shown) / 100) / 10;
  shown = now;
  return answer;
}

function choose(choice) {
  if (element("choices").disabled || element("pair").hidden) return;
  clock(answerOf(test.pairs[state.at])).choice = choice;
  state.at += 1;
  store();
  go();
}

function back() {
  if (state.at < test.pairs.length) clock(answerOf(test.pairs[state.at]));
  state.at = Math.max(0, state.at - 1);
  store();
  go();
}

function go() {
  if (!state.listener) view("begin");
  else if (state.at < test.pairs.length) showPair();
  else showEnd();
}

function ballot() {
  return {
    format: test.format,
    page: test.page,
    listener: state.listener,
    started: state.started,
    answers: test.pairs
      .map((pair) => ({ pair: pair.id, ...answerOf(pair) }))
      .filter((answer) => answer.choice)
      .map(({ pair, choice, seconds, plays }) => ({ pair, choice, seconds, plays })),
  };
}

function showEnd() {
  stop();
  const text = JSON.stringify(ballot(), null, 1);
  element("done").textContent = `${ballot().answers.length} of ${test.pairs.length} pairs are answered.`;
  element("answers").value = text;
  view("end");
}

function save() {
  const link = document.createElement("a");
  const name = state.listener.replace(/[^\p{L}\p{N}_-]+/gu, "_");
  link.href = URL.createObjectURL(new Blob([element("answers").value], { type: "application/json" }));
  link.download = `answers_${test.page}_${name}.json`;
  link.click();
  element("handover").hidden = false; // what is saved may be cleared for the next listener
}

function begin() {
  Object.assign(state, structuredClone(empty));
  store();
  element("handover").hidden = true;
  element("listener").value = "";
  go();
}

element("who").addEventListener("submit", (event) => {
  event.preventDefault();
  const name = element("listener").value.trim();
  if (!name) return;
  state.listener = name;
  state.started ??= new Date().toISOString();
  store();
  go();
});
document.addEventListener("played", (event) => {
  answerOf(test.pairs[state.at]).plays[event.target.dataset.side] += 1;
  store();
});
document.addEventListener("heard", (event) => {
  clock(answerOf(test.pairs[state.at])).heard[event.target.dataset.side] += 1;
  store();
  unlock();
});
element("choices").addEventListener("click", (event) => event.target.dataset.choice && choose(event.target.dataset.choice));
element("back").addEventListener("click", back);
element("again").addEventListener("click", back);
element("save").addEventListener("click", save);
element("another").addEventListener("click", begin);
document.addEventListener("keydown", (event) => {
  if (element("pair").hidden || event.ctrlKey || event.metaKey || event.altKey) return;
  const action = {
    1: () => element("play-first").click(),
    2: () => element("play-second").click(),
    ArrowLeft: () => choose("first"),
    ArrowDown: () => choose("none"),
    ArrowRight: () => choose("second"),
  }[event.key];
  if (action) {
    event.preventDefault();
    action();
  }
});
element("listener").value = state.listener;
go();
