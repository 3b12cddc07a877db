import { Token } from '@lumino/coreutils';
import { LabIcon } from '@jupyterlab/ui-components';

import type { GpuModel } from './model';
import type { Requests } from './requests';
import type { Sight } from './sight';

/** The model shared by all plugins of this extension. */
export const IGpuModel = new Token<IGpuModel>(
  'jupyter-gpushare:IGpuModel',
  'What is known about the share of a GPU that this server holds.'
);

export interface IGpuModel {
  readonly model: GpuModel;
  readonly requests: Requests;
  /** Decides where the sentence about the GPU is shown. */
  readonly sentence: Sight;
  /** Decides where the steps of waking are counted. */
  readonly steps: Sight;
  /** Decides where the reasons of jobs are shown. */
  readonly reasons: Sight;
  /** Returns the user's current settings. */
  readonly options: () => IOptions;
}

export interface IOptions {
  readonly keepMinutes: number;
  readonly toasts: boolean;
  readonly banner: boolean;
}

export namespace CommandIDs {
  export const open = 'gpushare:open';
  export const jobs = 'gpushare:jobs';
  export const launch = 'gpushare:launch';
  export const wake = 'gpushare:wake';
  export const keep = 'gpushare:keep';
  export const lend = 'gpushare:lend';
}

export const chipIcon = new LabIcon({
  name: 'gpushare:chip',
  svgstr:
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24" width="16">' +
    '<path class="jp-icon3 jp-icon-selectable" fill="#616161" d="M9 2v3H7a2 2 0 0 0-2 2v2H2v2h3v2H2v2h3v2' +
    'a2 2 0 0 0 2 2h2v3h2v-3h2v3h2v-3h2a2 2 0 0 0 2-2v-2h3v-2h-3v-2h3V9h-3V7a2 2 0 0 0-2-2h-2V2h-2v3h-2V2H9z' +
    'M8 8h8v8H8V8z"/></svg>'
});
