/** The size of a session as typed.  No widgets here. */

import { GPUS, MEMORY } from './sizes';
import { ISizeRequest } from './wire';

/** Returns the request for a size as typed; null: it is none. */
export function sizeOf(text: string, borrow: boolean, project: string | null): ISizeRequest | null {
  const size = text.replace(/\s/g, '');
  if (GPUS.test(size)) {
    return { gpus: size, memory: null, borrow, project };
  }
  // A number alone is a number of GPUs.
  return MEMORY.test(size) && /[a-z]/i.test(size) ? { gpus: null, memory: size, borrow, project } : null;
}
