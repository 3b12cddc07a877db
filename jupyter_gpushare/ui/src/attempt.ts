/** What a user asked for, and the answer when it is refused. */

import { Notification } from '@jupyterlab/apputils';

/** Does something, and returns whether it was done; a refusal is shown as a notification. */
export async function attempt(action: () => Promise<unknown>): Promise<boolean> {
  try {
    await action();
    return true;
  } catch (error) {
    Notification.error(error instanceof Error ? error.message : String(error), { autoClose: 8000 });
    return false;
  }
}
