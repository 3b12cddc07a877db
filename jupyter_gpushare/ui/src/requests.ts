/** The only way out of the page: requests to the user's own server, below `gpushare/`. */

import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';

import { IErrorAnswer, ILease, StatusAnswer } from './wire';

export type LeaseVerb = 'resume' | 'keep' | 'lend';

/** Asks for everything that is mine. */
export function fetchStatus(settings: ServerConnection.ISettings): Promise<StatusAnswer> {
  return request<StatusAnswer>(settings, 'status', { method: 'GET', cache: 'no-store' });
}

/** Wakes, keeps or lends a lease; a refusal is an Error with the broker's sentence. */
export function changeLease(
  settings: ServerConnection.ISettings,
  lease: string,
  verb: LeaseVerb,
  minutes: number
): Promise<ILease> {
  const body = verb === 'keep' ? JSON.stringify({ minutes }) : undefined;
  return request<ILease>(settings, `leases/${encodeURIComponent(lease)}/${verb}`, {
    method: 'POST',
    body
  });
}

async function request<T>(
  settings: ServerConnection.ISettings,
  path: string,
  init: RequestInit
): Promise<T> {
  const url = URLExt.join(settings.baseUrl, 'gpushare', path);
  const response = await ServerConnection.makeRequest(url, init, settings);
  const text = await response.text();
  if (!response.ok) {
    throw new Error(messageOf(text) ?? `${response.status} ${response.statusText}`);
  }
  return JSON.parse(text) as T;
}

function messageOf(text: string): string | undefined {
  try {
    return (JSON.parse(text) as Partial<IErrorAnswer>).message;
  } catch {
    return undefined;
  }
}
