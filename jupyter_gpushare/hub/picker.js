// Keeps the cards of the spawn page current, and waits for a size that is not free.
// It requests this page again, through the Hub, and takes over what has changed; inputs stay as they are.
document.addEventListener("DOMContentLoaded", () => {
  "use strict";
  const root = document.querySelector(".gpushare");
  const form = root?.closest("form");
  if (!form) return;
  const LIVE = "X-GPUShare-Live";
  const PAUSE_MS = 10000;
  const WAITING_PAUSE_MS = 5000;
  const MAX_PAUSE_MS = 30000;
  const START_WHEN_FREE = "Start when it is free";
  const NO_ANSWER = "The Hub does not answer just now; your place is asked for again.";
  const memory = `gpushare-waits ${location.pathname}`;
  const start = form.querySelector("[type=submit]");
  const label = start?.tagName === "INPUT" ? "value" : "textContent";
  const startLabel = start?.[label];
  const project = form.querySelector("[name=gpushare_project]");
  const place = root.querySelector(".gpushare-place");
  const sentence = root.querySelector(".gpushare-place-sentence");
  let wanted = null; // what this page waits for: {project, field, value}
  let timer = 0;
  let failures = 0;
  let answered = Promise.resolve(); // settles when every earlier request is answered

  const radios = (within) => [...within.querySelectorAll("input[type=radio]")];
  const same = (a, b) => a.name === b.name && a.value === b.value;
  const chosen = () => radios(root).find((x) => x.checked && x.name === `gpushare_size:${project.value}`);
  const canWait = (radio) => radio?.hasAttribute("data-waits") ?? false;
  const isWanted = (radio) => wanted !== null && radio?.name === wanted.field && radio.value === wanted.value;

  function labelStart() {
    if (!start) return;
    const radio = chosen();
    start[label] = canWait(radio) ? START_WHEN_FREE : startLabel;
    start.disabled = canWait(radio) && isWanted(radio);
  }

  function say(text) {
    if (sentence.textContent !== text) sentence.textContent = text;
    place.hidden = text === "";
    root.querySelector(".gpushare-place-more").hidden = wanted === null;
    labelStart();
  }

  function takeOver(fresh) {
    const freshRadios = radios(fresh);
    for (const radio of radios(root)) {
      const now = freshRadios.find((x) => same(x, radio));
      const about = radio.closest("label")?.querySelector(".gpushare-about");
      if (!now || !about) continue;
      radio.toggleAttribute("data-waits", canWait(now));
      // A chosen size stays enabled: otherwise the form would start a server without a GPU.
      radio.disabled = now.disabled && !canWait(now) && !radio.checked;
      about.replaceChildren(...now.closest("label").querySelector(".gpushare-about").childNodes);
    }
    for (const name of [".gpushare-trouble", ".gpushare-use"]) {
      const old = [...root.querySelectorAll(name)];
      const found = [...fresh.querySelectorAll(name)];
      if (old.length !== found.length) continue;
      old.forEach((each, n) => {
        if (each.innerHTML !== found[n].innerHTML) each.replaceChildren(...found[n].childNodes);
      });
    }
    labelStart();
  }

  function remember(choice) {
    wanted = choice;
    try {
      if (choice) sessionStorage.setItem(memory, JSON.stringify(choice));
      else sessionStorage.removeItem(memory);
    } catch {
      // Without storage a reload gives the place up.
    }
  }

  function begin(radio) {
    remember({ project: project.value, field: radio.name, value: radio.value });
    if (window.Notification?.permission === "default") Notification.requestPermission();
    say("Joining the queue.");
    ask();
  }

  function startNow(text) {
    const radio = radios(root).find(isWanted);
    remember(null);
    say(text);
    if (!radio) return;
    if (project.tagName === "SELECT") project.value = radio.name.slice("gpushare_size:".length);
    radio.removeAttribute("data-waits");
    radio.disabled = false;
    radio.checked = true;
    labelStart();
    if (window.Notification?.permission === "granted") {
      const name = radio.closest("label").querySelector("strong").textContent;
      new Notification(`${name}: free now`, { body: "Your server starts now.", tag: "gpushare" });
    }
    form.requestSubmit();
  }

  function show(fresh, awaited) {
    takeOver(fresh);
    if (awaited === null || awaited !== wanted) return;
    const found = fresh.querySelector(".gpushare-place");
    const text = found.querySelector(".gpushare-place-sentence").textContent;
    if (found.dataset.state === "ready") startNow(text);
    else if (found.dataset.state === "refused") {
      remember(null);
      say(text);
    } else say(text);
  }

  // Requests run one after the other: one that leaves the queue must not overtake one that joins it.
  function request(live) {
    const answer = answered.then(() => fetch(location.pathname, { headers: { [LIVE]: live }, cache: "no-store" }));
    answered = answer.catch(() => {});
    return answer;
  }

  async function ask() {
    clearTimeout(timer);
    const awaited = wanted;
    const options = awaited && { ...JSON.parse(awaited.value), project: awaited.project };
    try {
      const answer = await request(awaited ? encodeURIComponent(JSON.stringify(options)) : "offers");
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = page.querySelector(".gpushare");
      if (!answer.ok) throw new Error(answer.statusText);
      if (!fresh) {
        // The server runs by now, or the login has expired: the Hub shows which.
        if (awaited) location.reload();
        return;
      }
      failures = 0;
      show(fresh, awaited);
    } catch {
      failures += 1;
      if (awaited && awaited === wanted && failures > 1) say(NO_ANSWER);
    }
    plan();
  }

  function plan() {
    clearTimeout(timer);
    // A hidden page that waits for nothing sends no requests.
    if (!wanted && document.hidden) return;
    const pause = (wanted ? WAITING_PAUSE_MS : PAUSE_MS) * 2 ** failures;
    timer = setTimeout(ask, Math.min(pause, MAX_PAUSE_MS));
  }

  document.addEventListener(
    "submit",
    (event) => {
      if (event.target !== form) return;
      const radio = chosen();
      if (canWait(radio)) {
        event.preventDefault();
        event.stopImmediatePropagation();
        begin(radio);
      } else remember(null);
    },
    true,
  );
  document.addEventListener("visibilitychange", () => (document.hidden ? plan() : ask()));
  form.addEventListener("change", labelStart);
  root.querySelector(".gpushare-cancel").addEventListener("click", () => {
    const radio = radios(root).find(isWanted);
    remember(null);
    say("");
    radio?.focus();
    request("leave").catch(() => {});
    plan();
  });

  for (const radio of radios(root)) if (canWait(radio)) radio.disabled = false;
  try {
    const before = JSON.parse(sessionStorage.getItem(memory));
    if (before && radios(root).some((x) => x.name === before.field && x.value === before.value)) {
      wanted = before;
      say("Joining the queue.");
      ask();
    }
  } catch {
    // The stored value is not ours.
  }
  labelStart();
  plan();
});
