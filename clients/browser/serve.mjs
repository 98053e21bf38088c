// Starts the built `clary serve` on the demo model and waits until it is ready.

import { spawn } from 'node:child_process';
import { createServer } from 'node:net';
import { fileURLToPath } from 'node:url';

const ROOT = fileURLToPath(new URL('../..', import.meta.url));
const READY_MS = 120_000;

/** A port that is free now. */
function freePort() {
  return new Promise((resolve, reject) => {
    const server = createServer();
    server.on('error', reject);
    server.listen(0, '127.0.0.1', () => {
      const { port } = server.address();
      server.close(() => resolve(port));
    });
  });
}

/** The program under test: `CLARY`, or the release build of this checkout. */
function program() {
  const target = process.env.CARGO_TARGET_DIR ?? `${ROOT}/target`;
  return process.env.CLARY ?? `${target}/release/clary`;
}

async function ready(url, child, log) {
  const end = Date.now() + READY_MS;
  while (Date.now() < end) {
    if (child.exitCode !== null)
      throw new Error(`${program()} serve ended with ${child.exitCode}:\n${log()}`);
    const answer = await fetch(`${url}/ready`).catch(() => null);
    if (answer?.ok) return;
    await new Promise((next) => setTimeout(next, 100));
  }
  throw new Error(`clary serve was not ready in ${READY_MS / 1000} s:\n${log()}`);
}

/**
 * A running server: `url`, and `stop()`, which resolves to its exit code. Without `wait` it may still load.
 * `port` is one to take over from a server that ended.
 */
export async function serve(options = [], { wait = true, env = {}, port = null } = {}) {
  const place = port ?? (await freePort());
  const url = `http://127.0.0.1:${place}`;
  const child = spawn(program(), ['serve', 'models/demo', '--port', String(place), ...options], {
    cwd: ROOT,
    env: { ...process.env, ...env },
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  let text = '';
  for (const stream of [child.stdout, child.stderr]) stream.on('data', (part) => (text += part));
  const ended = new Promise((resolve, reject) => {
    child.on('error', reject);
    child.on('exit', resolve);
  });
  if (wait) await ready(url, child, () => text);
  const stop = () => {
    child.kill('SIGTERM');
    return ended;
  };
  return { url, port: place, stop, ready: () => ready(url, child, () => text) };
}
