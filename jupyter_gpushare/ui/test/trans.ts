import type { TranslationBundle } from '@jupyterlab/translation';

import { setTranslations } from '../src/translate';

/** English, from JupyterLab's own null translator. */
export const trans = {
  __: (text: string, ...args: unknown[]) => fill(text, args),
  _n: (one: string, many: string, n: number, ...args: unknown[]) => fill(n === 1 ? one : many, [n, ...args])
} as unknown as TranslationBundle;

setTranslations(trans);

function fill(text: string, args: unknown[]): string {
  return text.replace(/%(\d)/g, (_, index: string) => String(args[Number(index) - 1]));
}
