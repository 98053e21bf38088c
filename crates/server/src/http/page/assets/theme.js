// Light, dark, or as the system says.

import { icon, iconButton, say } from './dom.js';

const NEXT = { auto: 'light', light: 'dark', dark: 'auto' };
const NAMES = { auto: 'as the system', light: 'light', dark: 'dark' };

function current() {
  const theme = document.documentElement.dataset.theme;
  return theme in NEXT ? theme : 'auto';
}

function keep(theme) {
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem('clary.theme', theme);
  } catch {
    // Kept until the page is closed.
  }
}

/** The button that goes on to the next theme, and the function it calls. */
export function themeSwitch() {
  const label = () => `Theme: ${NAMES[current()]}`;
  const next = () => {
    keep(NEXT[current()]);
    made.replaceChildren(icon(current()));
    made.setAttribute('aria-label', label());
    made.title = label();
    say(label());
  };
  const made = iconButton(current(), label(), next, { id: 'theme' });
  return { element: made, next };
}
