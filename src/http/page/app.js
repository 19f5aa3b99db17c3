// Keeps the page current: an event tells that something changed, the server draws it, and only what differs is put in
// place, so that focus, selection, scroll and opened details stay.
"use strict";
const main = document.getElementById("state"), live = document.getElementById("live");
const PAUSE = 500, QUIET = 15000, PATIENCE = 5000;
let drawn = Date.now(), begun = 0, due = 0, isBusy = false, isOpen = false, stream = null, retry = 1000;

function span(seconds) {
  const s = Math.max(0, Math.floor(seconds)), m = Math.floor(s / 60), h = Math.floor(m / 60), d = Math.floor(h / 24);
  return s < 60 ? `${s} s` : m < 60 ? `${m} min` : h < 24 ? `${h} h ${m % 60} min` : `${d} d ${h % 24} h`;
}

// What is taken for the same node: by its id, else by what it is.
const key = node => node.nodeName + " " + (node.id || node.classList?.[0] || "");

// Makes `old` like `fresh`.
function morph(old, fresh) {
  for (const { name } of [...old.attributes])
    if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  for (const { name, value } of fresh.attributes)
    if (old.getAttribute(name) !== value && name !== "open") old.setAttribute(name, value);
  let at = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    let known = at;
    while (known && key(known) !== key(child)) known = known.nextSibling;
    if (!known) { old.insertBefore(child, at); continue; }
    if (known !== at) old.insertBefore(known, at);
    if (child.nodeType === Node.ELEMENT_NODE) morph(known, child);
    else if (known.data !== child.data) known.data = child.data;
    at = known.nextSibling;
  }
  while (at) { const next = at.nextSibling; at.remove(); at = next; }
}

async function refresh() {
  isBusy = true; begun = Date.now(); due = 0;
  try {
    const answer = await fetch("page/state", { signal: AbortSignal.timeout(PATIENCE), cache: "no-store" });
    if (!answer.ok) throw new Error(answer.status);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("state");
    if (!fresh) throw new Error("no state");
    if (fresh.dataset.version !== main.dataset.version) return location.reload();
    const focus = document.activeElement;
    morph(main, fresh);
    // An element that was moved lost it.
    if (focus !== document.activeElement && focus.isConnected) focus.focus({ preventScroll: true });
    document.title = `${main.dataset.title} · ${location.host}`;
    drawn = Date.now();
  } catch { due = due || Date.now() + PATIENCE; }
  isBusy = false;
  tick();
}

function changed() { due = due ? Math.min(due, begun + PAUSE) : begun + PAUSE; pump(); }

function pump() {
  if (isBusy || !due) return;
  const wait = due - Date.now();
  if (wait <= 0) refresh(); else setTimeout(pump, wait);
}

function connect() {
  stream = new EventSource("api/v1/events");
  stream.onopen = () => { isOpen = true; retry = 1000; tick(); };
  stream.onerror = () => {
    isOpen = false;
    // The browser tries again by itself, except after an answer that is no stream.
    if (stream.readyState === EventSource.CLOSED) { setTimeout(connect, retry); retry = Math.min(retry * 2, 30000); }
    tick();
  };
  for (const kind of ["snapshot", "incident", "lagged"]) stream.addEventListener(kind, changed);
}

// A message that stays the same is not written again: it is read out when it changes.
let said = "";
function say(word, text) {
  if (said !== word) {
    said = word;
    live.className = word;
    live.replaceChildren(Object.assign(document.createElement("b"), { textContent: word === "live" ? "Live" : "Not live" }), document.createElement("span"));
    live.firstChild.setAttribute("role", "status");
  }
  if (live.lastChild.textContent !== text) live.lastChild.textContent = text;
}

function tick() {
  const now = Date.now(), old = now - drawn;
  const isLive = isOpen && old < QUIET + PATIENCE;
  say(isLive ? "live" : "stale", isLive ? "" : `this is ${span(old / 1000)} old`);
  document.body.classList.toggle("stale", !isLive);
  if (!due && old > (isOpen ? QUIET : PATIENCE)) changed();
  pump();
  for (const time of document.querySelectorAll("time[data-after]")) {
    const text = span((now - Date.parse(time.dateTime)) / 1000) + time.dataset.after;
    if (time.textContent !== text) time.firstChild.data = text;
  }
}

connect();
setInterval(tick, 1000);
