/** The broker's events, which come through Jupyter's. */

import { EventManager, ServerConnection } from '@jupyterlab/services';

const EVENTS = 'https://jupyter-gpushare.readthedocs.io/events/';

/**
 * Calls `news` for every event of ours, and when their stream opens (again): what was
 * missed until then has to be asked for.
 */
export function listen(settings: ServerConnection.ISettings, news: () => void): EventManager {
  // JupyterLab's own manager of events does not tell when it is connected again.
  class Socket extends settings.WebSocket {
    constructor(url: string | URL, protocols?: string | string[]) {
      super(url, protocols);
      this.addEventListener('open', news);
    }
  }
  const events = new EventManager({ serverSettings: { ...settings, WebSocket: Socket } });
  events.stream.connect((_, event) => {
    if (event.schema_id.startsWith(EVENTS)) {
      news();
    }
  });
  return events;
}
