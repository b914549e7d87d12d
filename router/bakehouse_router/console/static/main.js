// Joins the parts of the page: one key, one way to the API, a chat and a live view over it.

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { Fleet } from "./fleet.js";
import { Key, KeyForm } from "./key.js";

const key = new Key();
const keyForm = new KeyForm(key, () => fleet.start());
const api = new Api(key, (message) => keyForm.refuse(message));
const fleet = new Fleet(api);
new Chat(api);
fleet.start();
