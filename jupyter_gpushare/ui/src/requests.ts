/** All requests of the page; they go to the user's own server, below `gpushare/`. */

import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';

import type { ILogPiece } from './log';
import { asSentence } from './messages';
import type { StatusAnswer } from './state';
import { translated } from './translate';
import {
  IErrorAnswer,
  IHistory,
  IJob,
  IJobChange,
  IJobList,
  IJobPlace,
  IJobTimeline,
  ILaunchForm,
  ILaunchRequest,
  ILeaseStatus,
  IOffers,
  IOffersQuery,
  ISizedLease,
  ISizeRequest
} from './wire';

export type LeaseVerb = 'resume' | 'stay-asleep' | 'keep' | 'lend';

/** Each request rejects with an Error that has the sentence of the broker or the server. */
export class Requests {
  constructor(
    private readonly _settings: ServerConnection.ISettings,
  ) {}

  /** Returns the user's leases, jobs and projects. */
  status(signal: AbortSignal): Promise<StatusAnswer> {
    return this._get<StatusAnswer>('status', signal);
  }

  /** Wakes, keeps or lends a lease. */
  changeLease(lease: string, verb: LeaseVerb, minutes: number): Promise<unknown> {
    const body = verb === 'keep' ? { minutes } : undefined;
    return this._send('POST', `leases/${encodeURIComponent(lease)}/${verb}`, body);
  }

  /** Resizes a lease, or gets the server's first one if it is null; resolves once kernels may use it. */
  resize(lease: ILeaseStatus | null, size: ISizeRequest): Promise<ISizedLease> {
    return this._send('PUT', `leases/${encodeURIComponent(lease?.id ?? 'own')}/size`, size);
  }

  /** Restarts a kernel to free its GPU memory. */
  releaseKernel(lease: string, kernel: string): Promise<unknown> {
    const [a, b] = [lease, kernel].map(encodeURIComponent);
    return this._send('POST', `leases/${a}/kernels/${b}/release`);
  }

  /** Ends the processes of a lease that keep GPU memory of ended kernels. */
  releaseLeft(lease: string): Promise<unknown> {
    return this._send('POST', `leases/${encodeURIComponent(lease)}/release`);
  }

  history(): Promise<IHistory> {
    return this._get<IHistory>('history');
  }

  offers(query: IOffersQuery): Promise<IOffers> {
    return this._get<IOffers>(`offers${URLExt.objectToQueryString(query)}`);
  }

  async jobs(limit: number): Promise<readonly IJob[]> {
    return (await this._get<IJobList>(`jobs?limit=${limit}`)).jobs;
  }

  timeline(job: string): Promise<IJobTimeline> {
    return this._get<IJobTimeline>(`jobs/${encodeURIComponent(job)}/timeline`);
  }

  /** Takes a job out of the queue, or stops it. */
  cancelJob(job: string): Promise<IJob> {
    return this._send('DELETE', `jobs/${encodeURIComponent(job)}`);
  }

  /** Changes a job in the queue; null keeps a field. */
  changeJob(job: string, change: IJobChange): Promise<IJob> {
    return this._send('PUT', `jobs/${encodeURIComponent(job)}`, change);
  }

  /** Moves a job in the queue before (-1) or behind (1) another. */
  placeJob(job: string, other: string, step: -1 | 1): Promise<IJob> {
    const place: IJobPlace = { before: step < 0 ? other : null, behind: step > 0 ? other : null };
    return this._send('PUT', `jobs/${encodeURIComponent(job)}/place`, place);
  }

  /** Submits an ended job again. */
  retryJob(job: string): Promise<IJob> {
    return this._send('POST', `jobs/${encodeURIComponent(job)}/retry`);
  }

  launchForm(path: string): Promise<ILaunchForm> {
    return this._get<ILaunchForm>(`launch${URLExt.objectToQueryString({ path })}`);
  }

  /** Submits a job; a repeated `key` refers to the same job. */
  launch(request: ILaunchRequest, key: string): Promise<IJob> {
    return this._send('POST', 'launch', request, { 'Idempotency-Key': key });
  }

  /** Returns a piece of a log; a negative offset counts from the end, attempt 0 is the newest. */
  async log(job: string, attempt: number, offset: number): Promise<ILogPiece> {
    const query = attempt > 0 ? { attempt, offset } : { offset };
    const path = `jobs/${encodeURIComponent(job)}/log${URLExt.objectToQueryString(query)}`;
    const response = await this._fetch(path, { method: 'GET', cache: 'no-store' });
    const number = (name: string): number => Number(response.headers.get(`X-Gpushare-${name}`) ?? 0);
    return {
      text: await response.text(),
      offset: number('Offset'),
      next: number('Next'),
      attempts: number('Attempts'),
      first: number('First'),
      leftOut: number('Left-Out'),
      why: response.headers.get('X-Gpushare-Why') ?? ''
    };
  }

  /** Returns the address of a whole log as a file. */
  logUrl(job: string, attempt: number): string {
    const query = URLExt.objectToQueryString(attempt > 0 ? { attempt, download: 1 } : { download: 1 });
    return URLExt.join(this._settings.baseUrl, 'gpushare/jobs', job, 'log') + query;
  }

  private async _get<T>(path: string, signal?: AbortSignal): Promise<T> {
    const response = await this._fetch(path, { method: 'GET', cache: 'no-store', signal });
    return translated((await response.json()) as T);
  }

  private async _send<T>(
    method: string,
    path: string,
    body?: unknown,
    headers?: Record<string, string>
  ): Promise<T> {
    // The stop of a job must be sent even while the page closes.
    const keepalive = method === 'DELETE';
    const init = { method, headers, keepalive, body: body === undefined ? undefined : JSON.stringify(body) };
    return translated((await (await this._fetch(path, init)).json()) as T);
  }

  private async _fetch(path: string, init: RequestInit): Promise<Response> {
    const url = URLExt.join(this._settings.baseUrl, 'gpushare') + `/${path}`;
    const response = await ServerConnection.makeRequest(url, init, this._settings);
    if (!response.ok) {
      const message = messageOf(await response.text());
      throw new Error(message ?? `${response.status} ${response.statusText}`);
    }
    return response;
  }
}

/** Returns the translated message of a refusal; undefined if another program answered. */
export function messageOf(text: string): string | undefined {
  try {
    const message = translated(JSON.parse(text) as Partial<IErrorAnswer>).message;
    return message === undefined ? undefined : asSentence(message);
  } catch {
    return undefined;
  }
}
