/** Translates the broker's sentences, which come as English text and as keys with arguments. */

import type { TranslationBundle } from '@jupyterlab/translation';

import { CATALOGUE } from './catalogue';
import type { IText } from './wire';

/** Returns the translation of a text; null if this page is older than its key. */
function translation(trans: TranslationBundle, text: IText): string | null {
  const template = Object.prototype.hasOwnProperty.call(CATALOGUE, text.key) ? CATALOGUE[text.key] : undefined;
  const args = text.args.map(each => (typeof each === 'string' ? each : translation(trans, each)));
  return template === undefined || args.includes(null) ? null : template(trans, args as string[]);
}

const SUFFIX = '_texts';

/**
 * Returns an answer of the server with each `x` replaced by the translation of its
 * `x_texts`.  The English text stays where the broker sent no keys, or an unknown one.
 */
export function translated<T>(trans: TranslationBundle, answer: T): T {
  if (Array.isArray(answer)) {
    return answer.map(each => translated(trans, each)) as unknown as T;
  }
  if (typeof answer !== 'object' || answer === null) {
    return answer;
  }
  const fields: { [name: string]: unknown } = {};
  for (const [name, value] of Object.entries(answer)) {
    fields[name] = name.endsWith(SUFFIX) ? value : translated(trans, value);
  }
  for (const [name, value] of Object.entries(answer)) {
    if (name.endsWith(SUFFIX) && Array.isArray(value)) {
      const texts = (value as readonly IText[]).map(text => translation(trans, text));
      if (texts.length > 0 && !texts.includes(null)) {
        fields[name.slice(0, -SUFFIX.length)] = texts.join(' ');
      }
    }
  }
  return fields as T;
}
