// The form of the settings.

import { button, h } from './dom.js';
import { GROUPS, mistake } from './settings.js';

const idOf = (name) => `setting-${name}`;

function control(field, value, defaults) {
  const id = idOf(field.name);
  const common = { id, name: field.name, 'aria-describedby': `${id}-hint` };
  if (field.kind === 'choice') {
    const options = field.options.map(([key, label]) =>
      h('option', { value: key, selected: key === value }, label),
    );
    return h('select', common, options);
  }
  if (field.kind === 'text') {
    const area = h('textarea', {
      ...common,
      rows: field.rows,
      class: field.code ? 'code-input' : null,
      spellcheck: field.code ? 'false' : null,
    });
    area.value = value;
    return area;
  }
  const shown = defaults?.[field.shown];
  const placeholder = shown === undefined ? 'as the server' : `${Number(shown.toPrecision(4))} (server)`;
  return h('input', {
    ...common,
    type: 'number',
    min: field.min,
    max: field.max,
    step: field.step,
    value,
    placeholder,
    inputmode: 'decimal',
  });
}

function row(field, value, defaults) {
  const id = idOf(field.name);
  return h(
    'div',
    { class: `field ${field.kind}` },
    h('label', { for: id }, field.label),
    control(field, value, defaults),
    h('p', { class: 'hint', id: `${id}-hint` }, field.hint),
  );
}

/**
 * A form over `typed`; `done(typed)` gets what was typed, or null. `defaults` are the server's, `at` the name
 * of the field to begin with.
 */
export function settingsForm(typed, defaults, at, done) {
  const problem = h('p', { class: 'problem', role: 'alert', hidden: true });
  const form = h(
    'form',
    { class: 'sheet', novalidate: true },
    h('h2', {}, 'Settings'),
    h(
      'div',
      { class: 'sheet-body' },
      GROUPS.map(({ title, fields }) =>
        h(
          'fieldset',
          {},
          h('legend', {}, title),
          fields.map((field) => row(field, typed[field.name] ?? '', defaults)),
        ),
      ),
      problem,
    ),
    h(
      'div',
      { class: 'row' },
      button('Reset all', () => done({})),
      h('span', { class: 'spring' }),
      button('Cancel', () => done(null)),
      h('button', { class: 'button strong', id: 'save-settings' }, 'Save'),
    ),
  );
  form.addEventListener('submit', (event) => {
    event.preventDefault();
    const values = Object.fromEntries(new FormData(form));
    for (const field of GROUPS.flatMap((group) => group.fields)) {
      const wrong = form.elements[field.name].validity?.badInput
        ? `${field.label} is not a number.`
        : mistake(field, values[field.name]);
      if (wrong) {
        problem.textContent = wrong;
        problem.hidden = false;
        form.elements[field.name].focus();
        return;
      }
    }
    done(values);
  });
  const first = () => (at && form.elements[at] ? form.elements[at] : form.elements.system).focus();
  return { element: form, first };
}
