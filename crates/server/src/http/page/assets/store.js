// Chats in the browser's own database. They never leave it but as the messages of a request.

const NAME = 'clary';
const CHATS = 'chats';

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function open() {
  const request = indexedDB.open(NAME, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(CHATS, { keyPath: 'id' });
  return done(request);
}

/** Chats by id. Where the browser keeps nothing, they live as long as the page. */
export class Store {
  #database = null;
  #chats = new Map();
  /** Whether chats outlive the page. */
  lasting = false;

  /** Reads all chats, newest first. */
  async load() {
    try {
      this.#database = await open();
      const chats = await done(this.#area('readonly').getAll());
      for (const chat of chats) this.#chats.set(chat.id, chat);
      this.lasting = true;
    } catch {
      this.#database = null;
    }
    return this.list();
  }

  #area(mode) {
    return this.#database.transaction(CHATS, mode).objectStore(CHATS);
  }

  /** All chats, newest first. */
  list() {
    return [...this.#chats.values()].sort((a, b) => b.updated - a.updated);
  }

  /** A chat, or undefined. */
  get(id) {
    return this.#chats.get(id);
  }

  /** Keeps a chat as it is now. False if the browser has no room for it. */
  async put(chat) {
    this.#chats.set(chat.id, chat);
    if (!this.#database) return true;
    try {
      await done(this.#area('readwrite').put(structuredClone(chat)));
      return true;
    } catch {
      return false;
    }
  }

  /** Forgets a chat. */
  async remove(id) {
    this.#chats.delete(id);
    if (this.#database) await done(this.#area('readwrite').delete(id));
  }
}
