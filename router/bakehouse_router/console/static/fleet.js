// The live view: asks once a second how replicas and gateway are doing, while somebody looks.

import { drawCells } from "./cells.js";
import { ApiError } from "./api.js";
import { count, counted, duration, rate, share } from "./format.js";

const PATH = "v1/replicas";
const PERIOD_MS = 1000;
const MAX_PERIOD_MS = 30_000;
const TIMEOUT_MS = 10_000;
// Replicas hand their counts over twice a second: over a shorter time, a rate would be mostly noise.
const RATE_WINDOW_S = 5;
const N_CURVE = 120;

/** How fast a count grows, by what was told of it in the last seconds. */
class Pace {
  #told = [];

  /** The rate per second once `n` has been told at `atS`; null while only one report is known. */
  tell(n, atS) {
    const last = this.#told.at(-1);
    // Of several gateways that answer in turn, one may have older news.
    if (!last || (atS > last.atS && n >= last.n)) this.#told.push({ n, atS });
    while (this.#told.length > 2 && atS - this.#told[1].atS >= RATE_WINDOW_S) this.#told.shift();
    const [first] = this.#told;
    const newest = this.#told.at(-1);
    return newest.atS > first.atS ? (newest.n - first.n) / (newest.atS - first.atS) : null;
  }
}

function setFigure(element, name, text) {
  element.querySelector(`[data-figure="${name}"]`).textContent = text;
}

/** One replica's part of the page. */
class ReplicaView {
  #pace = new Pace();
  #curve = [];

  constructor(id) {
    const made = document.getElementById("replica-template").content.cloneNode(true);
    this.element = made.firstElementChild;
    this.element.querySelector("h3").textContent = id;
  }

  /** Shows a report that came at `nowS`; the tokens per second, null where they are not known. */
  show(told, nowS) {
    const { load, counted: counts } = told;
    const perSecond = counts && this.#pace.tell(counts.computed_tokens, nowS - told.age_s);
    this.#showState(told);
    setFigure(this.element, "computed", rate(perSecond));
    setFigure(this.element, "step", load.n_running ? duration(told.step_time_s) : "idle");
    setFigure(this.element, "queue", `${count(load.n_waiting)} (${counted(load.waiting_tokens, "token")})`);
    setFigure(this.element, "hits", counts ? share(counts.prefix_hit_tokens, counts.prefix_queried_tokens) : "–");
    setFigure(this.element, "preemptions", counts ? count(counts.preemptions) : "–");
    setFigure(this.element, "context", counted(told.max_model_len, "token"));
    this.#showCells(told);
    this.#showCurve(perSecond ?? 0);
    return perSecond;
  }

  #showState({ serves, problem, age_s: ageS }) {
    const state = this.element.querySelector(".state");
    state.textContent = serves ? "serves" : "does not serve";
    state.classList.toggle("bad", !serves);
    this.element.querySelector(".age").textContent = `heard ${ageS.toFixed(1)} s ago`;
    const problemLine = this.element.querySelector(".problem");
    problemLine.textContent = problem ?? "";
    problemLine.hidden = problem === null;
  }

  #showCells({ load, max_sequences: nSlots }) {
    const slots = [
      { kind: "held", n: load.n_running, label: "running" },
      { kind: "free", n: Math.max(0, nSlots - load.n_running), label: "free" },
    ];
    const blocks = [
      { kind: "held", n: load.n_held_blocks, label: "held" },
      { kind: "cached", n: load.n_cached_blocks, label: "cached" },
      { kind: "free", n: load.n_free_blocks, label: "free" },
    ];
    const legend = (name) => this.element.querySelector(`[data-legend="${name}"]`);
    drawCells(this.element.querySelector(".slots"), legend("slots"), slots, "sequences");
    drawCells(this.element.querySelector(".blocks"), legend("blocks"), blocks, "blocks");
  }

  #showCurve(perSecond) {
    this.#curve = [...this.#curve, perSecond].slice(-N_CURVE);
    const top = Math.max(1, ...this.#curve);
    const points = this.#curve.map((value, index) => `${index},${(23 - (22 * value) / top).toFixed(1)}`);
    const curve = this.element.querySelector(".curve");
    curve.firstElementChild.setAttribute("points", points.join(" "));
    curve.setAttribute("aria-label", `Tokens per second in the last two minutes, at most ${rate(top)}`);
  }
}

/** Polls from `start` on: one request at a time, slower and slower while they fail, none while nobody looks. */
export class Fleet {
  #api;
  #views = new Map();
  #paces = new Map();
  #timer = null;
  #asking = null;
  #nFailures = 0;
  #sums = document.getElementById("sums");
  #list = document.getElementById("replicas");
  #nobody = document.getElementById("nobody");
  #news = document.getElementById("news");
  #model = document.getElementById("model");

  constructor(api) {
    this.#api = api;
    document.addEventListener("visibilitychange", () => this.start());
  }

  /** Ask now, and go on asking. */
  start() {
    this.#nFailures = 0;
    clearTimeout(this.#timer);
    this.#asking?.abort();
    this.#ask();
  }

  async #ask() {
    if (document.visibilityState === "hidden") return;
    const asking = (this.#asking = new AbortController());
    try {
      const signal = AbortSignal.any([asking.signal, AbortSignal.timeout(TIMEOUT_MS)]);
      this.#show(await this.#api.get(PATH, signal));
      this.#nFailures = 0;
      this.#tell("live");
    } catch (error) {
      if (asking.signal.aborted) return; // another has been begun, or nobody looks any more
      this.#nFailures += 1;
      if (error.status === 401) return this.#tell("waits for an API key"); // until `start`
      const isOurs = !(error instanceof ApiError || error.name === "TimeoutError");
      this.#tell(isOurs ? `this page has failed: ${error}` : `not live: ${error.message}`);
      if (isOurs) throw error;
    }
    const pauseMs = Math.min(PERIOD_MS * 2 ** this.#nFailures, MAX_PERIOD_MS);
    this.#timer = setTimeout(() => this.#ask(), pauseMs);
  }

  #tell(news) {
    // Said once: this is read aloud.
    if (this.#news.textContent !== news) this.#news.textContent = news;
    this.#news.classList.toggle("bad", news !== "live");
  }

  #show({ data, gateway }) {
    const nowS = performance.now() / 1000;
    this.#keepOnly(data.map(({ id }) => id));
    let computed = null;
    for (const told of data) {
      const perSecond = this.#view(told.id).show(told, nowS);
      if (perSecond !== null) computed = (computed ?? 0) + perSecond;
    }
    this.#nobody.hidden = data.length > 0;
    this.#model.textContent = gateway.model;
    this.#showSums(data, gateway, computed, nowS);
  }

  #showSums(data, gateway, computed, nowS) {
    const sum = (name) => data.reduce((total, { load }) => total + load[name], 0);
    if (!this.#paces.has(gateway.id)) this.#paces.set(gateway.id, new Pace());
    const output = this.#paces.get(gateway.id).tell(gateway.generated_tokens, nowS);
    const queue = `${count(gateway.n_waiting)} (${counted(gateway.waiting_tokens, "token")})`;
    setFigure(this.#sums, "computed", rate(computed));
    setFigure(this.#sums, "running", count(sum("n_running")));
    setFigure(this.#sums, "waiting", count(sum("n_waiting")));
    setFigure(this.#sums, "open", count(gateway.n_open));
    setFigure(this.#sums, "queue", queue);
    setFigure(this.#sums, "output", rate(output));
  }

  #keepOnly(ids) {
    for (const [id, view] of this.#views) {
      if (!ids.includes(id)) {
        view.element.remove();
        this.#views.delete(id);
      }
    }
  }

  #view(id) {
    if (!this.#views.has(id)) {
      const view = new ReplicaView(id);
      this.#views.set(id, view);
      this.#list.append(view.element);
    }
    return this.#views.get(id);
  }
}
