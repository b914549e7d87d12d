// Keeps the API key, and asks for it. It is in the header of requests and nowhere else: not in an address, not on disk.

const NAME = "bakehouse-key";

/** The key of this tab, "" where there is none. `storage` may be closed to pages; the key then goes with the page. */
export class Key {
  #value = "";

  constructor() {
    try {
      this.#value = sessionStorage.getItem(NAME) ?? "";
    } catch {
      // Closed by the browser's settings.
    }
  }

  get value() {
    return this.#value;
  }

  set value(given) {
    this.#value = given;
    try {
      if (given) sessionStorage.setItem(NAME, given);
      else sessionStorage.removeItem(NAME);
    } catch {
      // As above.
    }
  }
}

/** The form that asks for it. `onChange` is called when another one has been given. */
export class KeyForm {
  #form = document.getElementById("key-form");
  #input = document.getElementById("key");
  #toggle = document.getElementById("key-toggle");
  #problem = document.getElementById("key-problem");

  constructor(key, onChange) {
    this.#toggle.addEventListener("click", () => {
      this.#show(this.#form.hidden);
      if (!this.#form.hidden) this.#input.focus();
    });
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      const given = this.#input.value.trim();
      // What comes along when it is copied, such as a space of no width, no header carries.
      if (/[^!-~]/.test(given)) return this.refuse("a key has printable ASCII characters alone, and no spaces");
      key.value = given;
      this.#input.value = "";
      this.#problem.textContent = "";
      this.#show(false);
      this.#toggle.focus();
      onChange();
    });
  }

  /** The gateway has refused the key, or the lack of one, in these words. */
  refuse(message) {
    this.#problem.textContent = message;
    this.#show(true);
  }

  #show(isShown) {
    this.#form.hidden = !isShown;
    this.#toggle.setAttribute("aria-expanded", String(isShown));
  }
}
