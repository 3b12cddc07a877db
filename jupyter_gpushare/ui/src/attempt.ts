/** Actions of the user, with a notification when one is refused. */

import { Notification } from '@jupyterlab/apputils';

/** Runs an action and returns whether it succeeded; a notification shows a refusal. */
export async function attempt(action: () => Promise<unknown>): Promise<boolean> {
  try {
    await action();
    return true;
  } catch (error) {
    Notification.error(error instanceof Error ? error.message : String(error), { autoClose: 8000 });
    return false;
  }
}
