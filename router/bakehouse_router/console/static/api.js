// Talks to the gateway that has served this page: JSON, server-sent events, and errors in the API's own words.

/** What the API, or the way to it, says has gone wrong. `status` null: nothing has answered, or a stream has broken. */
export class ApiError extends Error {
  constructor(message, status = null, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The API under the key of `key`; `onRefused` hears why where there is no key, or none that counts. */
export class Api {
  #key;
  #onRefused;

  constructor(key, onRefused) {
    this.#key = key;
    this.#onRefused = onRefused;
  }

  /** The JSON at `path`. Throws `ApiError`, or what `signal` says. */
  async get(path, signal) {
    const response = await this.#fetch(path, { signal });
    try {
      return await response.json();
    } catch (error) {
      if (signal.aborted) throw error;
      throw new ApiError(`the answer of the gateway broke off: ${error.message}`);
    }
  }

  /** The response to a body of JSON. Throws as `get` does. */
  async post(path, body, signal) {
    const headers = { "content-type": "application/json" };
    return await this.#fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  }

  async #fetch(path, options) {
    const headers = new Headers(options.headers);
    if (this.#key.value) headers.set("authorization", `Bearer ${this.#key.value}`);
    let response;
    try {
      // Relative: a proxy may have put the gateway under a path of its own.
      response = await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (options.signal.aborted) throw error;
      throw new ApiError(`the gateway cannot be reached: ${error.message}`);
    }
    if (response.ok) return response;
    const error = await problemOf(response);
    if (error.status === 401) this.#onRefused(error.message);
    throw error;
  }
}

async function problemOf(response) {
  let told = null;
  try {
    told = (await response.json()).error;
  } catch {
    // Not from the gateway: a proxy before it.
  }
  const message = told?.message ?? `${response.status} ${response.statusText}`;
  return new ApiError(message, response.status, told?.code ?? null);
}

/**
 * The payloads of a stream of events, those of one network read together, up to `[DONE]`.
 * Throws `ApiError` where an event says so, or where the stream ends without `[DONE]`.
 */
export async function* payloads(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw new ApiError(`the stream broke off: ${error.message}`);
    });
    if (done) throw new ApiError("the stream broke off before its end");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    const lines = events.filter((event) => event.startsWith("data: ")).map((event) => event.slice(6));
    const isOver = lines.at(-1) === "[DONE]";
    const told = lines.filter((line) => line !== "[DONE]").map((line) => JSON.parse(line));
    const broken = told.findIndex((payload) => payload.error);
    if (told.length) yield broken < 0 ? told : told.slice(0, broken);
    if (broken >= 0) throw new ApiError(told[broken].error.message, null, told[broken].error.code);
    if (isOver) return;
  }
}
