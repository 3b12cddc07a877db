/**
 * The page's language, and the broker's sentences in it.  A sentence arrives as English text and
 * as a key with arguments.
 */

import type { TranslationBundle } from '@jupyterlab/translation';

import { CATALOGUE } from './catalogue';
import type { IText } from './wire';

/** JupyterLab's translations; the plugin of the model sets them before anything is shown. */
export let trans: TranslationBundle;

export function setTranslations(bundle: TranslationBundle): void {
  trans = bundle;
}

/** Returns the translation of a text; null if this page is older than its key. */
function translation(text: IText): string | null {
  const template = Object.prototype.hasOwnProperty.call(CATALOGUE, text.key) ? CATALOGUE[text.key] : undefined;
  const args = text.args.map(each => (typeof each === 'string' ? each : translation(each)));
  return template === undefined || args.includes(null) ? null : template(trans, args as string[]);
}

const SUFFIX = '_texts';

/**
 * Returns an answer of the server, with each `x` replaced by the translation of its `x_texts`.
 * The English text stays if the broker sent no key or an unknown one.
 */
export function translated<T>(answer: T): T {
  if (Array.isArray(answer)) {
    return answer.map(each => translated(each)) as unknown as T;
  }
  if (typeof answer !== 'object' || answer === null) {
    return answer;
  }
  const fields: { [name: string]: unknown } = {};
  for (const [name, value] of Object.entries(answer)) {
    fields[name] = name.endsWith(SUFFIX) ? value : translated(value);
  }
  for (const [name, value] of Object.entries(answer)) {
    if (name.endsWith(SUFFIX) && Array.isArray(value)) {
      const texts = (value as readonly IText[]).map(text => translation(text));
      if (texts.length > 0 && !texts.includes(null)) {
        fields[name.slice(0, -SUFFIX.length)] = texts.join(' ');
      }
    }
  }
  return fields as T;
}
