// One audio element for all players: a second one stops the first. Clips are kept once, however often they are shown.
const clips = JSON.parse(document.getElementById("clips").textContent);
const audio = new Audio();
const urls = new Map();
let current = null;

// A blob, not the data URI itself: phones seek in it.
function urlOf(name) {
  if (!urls.has(name)) {
    const [head, body] = clips[name].split(",");
    const bytes = Uint8Array.from(atob(body), (letter) => letter.charCodeAt(0));
    urls.set(name, URL.createObjectURL(new Blob([bytes], { type: head.slice(5).split(";")[0] })));
  }
  return urls.get(name);
}

function show(button, fraction) {
  button.style.setProperty("--at", `${100 * fraction}%`);
}

function stop() {
  audio.pause();
  if (current) {
    current.classList.remove("playing");
    current.setAttribute("aria-pressed", "false");
    show(current, 0);
  }
  current = null;
}

function play(button, from = 0) {
  if (current !== button) {
    stop();
    current = button;
    audio.src = urlOf(button.dataset.clip);
  }
  button.classList.add("playing");
  button.setAttribute("aria-pressed", "true");
  audio.currentTime = from;
  audio.play().then(
    () => button.dispatchEvent(new CustomEvent("played", { bubbles: true })),
    () => button === current && stop(),
  );
  requestAnimationFrame(follow);
}

function follow() {
  if (!current || audio.paused) return;
  if (audio.duration) show(current, audio.currentTime / audio.duration);
  requestAnimationFrame(follow);
}

audio.addEventListener("ended", () => {
  const ended = current;
  stop();
  if (ended) ended.dispatchEvent(new CustomEvent("heard", { bubbles: true }));
});
document.addEventListener("click", (event) => {
  const button = event.target.closest(".player");
  if (!button) return;
  const wave = button.querySelector(".wave").getBoundingClientRect();
  const inWave = event.detail > 0 && event.clientX > wave.left && event.clientX < wave.right;
  if (button === current && inWave && button.hasAttribute("data-seek")) {
    audio.currentTime = ((event.clientX - wave.left) / wave.width) * audio.duration;
  } else if (button === current) {
    stop();
  } else {
    play(button);
  }
});
