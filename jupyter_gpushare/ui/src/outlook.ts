/** The line above the dialog's button. */


import type { Outlook } from './launch';
import { trans } from './translate';

export function outlookText(outlook: Outlook): string {
  switch (outlook.kind) {
    case 'none':
      return '';
    case 'asking':
      return trans.__('Asking what is free.');
    case 'refused':
      return outlook.message;
    case 'known':
      return outlook.outlook.sentence;
  }
}
