/** The broker's events, received through Jupyter's event stream. */

import { EventManager, ServerConnection } from '@jupyterlab/services';

const EVENTS = 'https://jupyter-gpushare.readthedocs.io/events/';

/**
 * Calls `changed` for each of our events and whenever the stream opens, because events in between
 * were missed.
 */
export function listen(settings: ServerConnection.ISettings, changed: () => void): EventManager {
  // JupyterLab's own event manager has no signal for a reconnection.
  class Socket extends settings.WebSocket {
    constructor(url: string | URL, protocols?: string | string[]) {
      super(url, protocols);
      this.addEventListener('open', changed);
    }
  }
  const events = new EventManager({ serverSettings: { ...settings, WebSocket: Socket } });
  events.stream.connect((_, event) => {
    if (event.schema_id.startsWith(EVENTS)) {
      changed();
    }
  });
  return events;
}
