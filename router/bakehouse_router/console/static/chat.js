// The conversation: what is asked, the answer as it comes, and what it cost.

import { ApiError, payloads } from "./api.js";
import { counted, duration, rate } from "./format.js";

const PATH = "v1/chat/completions";
// By field of the request.
const NUMBERS = { temperature: "temperature", max_tokens: "max-tokens", seed: "seed" };
// Nearer to the end than this, the log follows the answer.
const FOLLOWS_PX = 40;

/** One question and its answer on the page; `text` is what has come of it. */
class Exchange {
  text = "";
  #answer = document.createTextNode("");
  #problem;
  #timing;
  #element;

  constructor(question) {
    const made = document.getElementById("exchange-template").content.cloneNode(true);
    this.#element = made.firstElementChild;
    this.question = question;
    this.#element.querySelector(".question").textContent = question;
    this.#element.querySelector(".answer").append(this.#answer);
    this.#problem = this.#element.querySelector(".problem");
    this.#timing = this.#element.querySelector(".timing");
  }

  appendTo(log) {
    log.append(this.#element);
  }

  add(text) {
    this.text += text;
    this.#answer.appendData(text);
  }

  fail(message) {
    this.#problem.textContent = message;
    this.#problem.hidden = false;
  }

  tell(timing) {
    this.#timing.textContent = timing;
  }

  /** Offers the story of its request, which `load` brings, or why it cannot be had. */
  offerStory(load) {
    const why = this.#element.querySelector(".why");
    const story = this.#element.querySelector(".story");
    why.hidden = false;
    why.addEventListener("click", async () => {
      const isAsked = story.hidden;
      if (isAsked) story.textContent = await load();
      story.hidden = !isAsked;
      why.setAttribute("aria-expanded", String(isAsked));
    });
  }
}

/** What is known of an answer's cost; moments are the page's, in seconds. */
class Timing {
  #sentAt = performance.now() / 1000;
  #firstAt = null;
  #lastAt = null;
  usage = null;
  finish = null;
  replica = null;
  requestId = null;

  /** Text has come. */
  see() {
    this.#lastAt = performance.now() / 1000;
    this.#firstAt ??= this.#lastAt;
  }

  toString() {
    const told = [];
    if (this.usage) {
      told.push(`${counted(this.usage.prompt_tokens, "token")} in, ${this.usage.completion_tokens} out`);
    }
    if (this.#firstAt !== null) {
      told.push(`first token after ${duration(this.#firstAt - this.#sentAt)}`);
      const n = (this.usage?.completion_tokens ?? 0) - 1;
      if (n > 0 && this.#lastAt > this.#firstAt) told.push(`${rate(n / (this.#lastAt - this.#firstAt))} tok/s`);
    }
    if (this.finish) told.push(this.finish);
    if (this.replica) told.push(`replica ${this.replica}`);
    if (this.requestId) told.push(`request ${this.requestId}`);
    return told.join(" · ");
  }
}

/** The chat over `api`: owns the conversation and the one request that may be in flight. */
export class Chat {
  #api;
  #model = null;
  #exchanges = [];
  #inFlight = null;
  #log = document.getElementById("log");
  #empty = document.getElementById("empty");
  #form = document.getElementById("ask");
  #question = document.getElementById("question");
  #send = document.getElementById("send");
  #stop = document.getElementById("stop");

  constructor(api) {
    this.#api = api;
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    // A field with something wrong must be seen to be mended.
    const details = this.#form.querySelector("details");
    details.addEventListener("invalid", () => (details.open = true), { capture: true });
    this.#question.addEventListener("keydown", (event) => {
      // While an input method composes a character, Enter belongs to it.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#form.requestSubmit();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#inFlight?.abort();
    });
    this.#stop.addEventListener("click", () => this.#inFlight?.abort());
    document.getElementById("clear").addEventListener("click", () => this.#clear());
  }

  async #ask() {
    const question = this.#question.value.trim();
    if (!question || this.#inFlight) return;
    const body = this.#body(question);
    const exchange = new Exchange(question);
    const inFlight = new AbortController();
    this.#question.value = "";
    this.#empty.hidden = true;
    this.#exchanges.push(exchange);
    exchange.appendTo(this.#log);
    this.#log.scrollTop = this.#log.scrollHeight;
    this.#setInFlight(inFlight);
    try {
      await this.#stream(body, exchange, inFlight.signal);
    } catch (error) {
      if (inFlight.signal.aborted) return; // what has come stands
      this.#exchanges = this.#exchanges.filter((each) => each !== exchange);
      this.#question.value ||= question;
      if (!(error instanceof ApiError)) {
        exchange.fail(`this page has failed: ${error}`);
        throw error;
      }
      exchange.fail(error.status === null ? error.message : `${error.status}: ${error.message}`);
    } finally {
      // Clear may have begun another conversation meanwhile.
      if (this.#inFlight === inFlight) this.#setInFlight(null);
    }
  }

  async #stream(body, exchange, signal) {
    const timing = new Timing();
    try {
      body.model = this.#model ??= (await this.#api.get("v1/models", signal)).data[0].id;
      const response = await this.#api.post(PATH, body, signal);
      timing.replica = response.headers.get("x-bakehouse-replica");
      timing.requestId = response.headers.get("x-request-id");
      if (timing.requestId) exchange.offerStory(() => this.#story(timing.requestId));
      for await (const read of payloads(response)) {
        const isAtEnd = this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < FOLLOWS_PX;
        this.#take(read, exchange, timing);
        if (isAtEnd) this.#log.scrollTop = this.#log.scrollHeight;
      }
    } catch (error) {
      if (signal.aborted) timing.finish = "stopped";
      else if (error.code === "model_not_found") this.#model = null; // another one may be served by now
      throw error;
    } finally {
      exchange.tell(timing.toString());
    }
  }

  async #story(requestId) {
    const path = `v1/requests/${encodeURIComponent(requestId)}/explain`;
    try {
      return JSON.stringify(await this.#api.get(path, new AbortController().signal), null, 2);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      return error.message; // of several gateways, another one may know: the next click asks again
    }
  }

  #take(read, exchange, timing) {
    let text = "";
    for (const payload of read) {
      if (payload.usage) timing.usage = payload.usage;
      const choice = payload.choices[0];
      text += choice?.delta.content ?? "";
      timing.finish = choice?.finish_reason ?? timing.finish;
    }
    if (text) {
      timing.see();
      exchange.add(text);
    }
    exchange.tell(timing.toString());
  }

  #body(question) {
    const system = document.getElementById("system").value.trim();
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const { question: content, text } of this.#exchanges) {
      if (text) messages.push({ role: "user", content }, { role: "assistant", content: text });
    }
    messages.push({ role: "user", content: question });
    // Counted along: what was stopped has counts, too.
    const body = { messages, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    for (const [field, id] of Object.entries(NUMBERS)) {
      const { value } = document.getElementById(id);
      if (value !== "") body[field] = Number(value);
    }
    return body;
  }

  #clear() {
    this.#inFlight?.abort();
    this.#setInFlight(null);
    this.#exchanges = [];
    this.#log.replaceChildren(this.#empty);
    this.#empty.hidden = false;
    this.#question.focus();
  }

  #setInFlight(inFlight) {
    this.#inFlight = inFlight;
    this.#send.disabled = inFlight !== null;
    this.#stop.disabled = inFlight === null;
    // Read aloud when it is whole, not word by word.
    this.#log.setAttribute("aria-busy", String(inFlight !== null));
  }
}
