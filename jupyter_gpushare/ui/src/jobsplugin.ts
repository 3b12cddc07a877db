/** The plugin of the training jobs: two commands, loaded when they are used. */

import { ILayoutRestorer, JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import {
  Dialog,
  ICommandPalette,
  MainAreaWidget,
  Notification,
  showDialog,
  WidgetTracker
} from '@jupyterlab/apputils';
import type { IDocumentWidget } from '@jupyterlab/docregistry';
import { IFileBrowserFactory } from '@jupyterlab/filebrowser';
import { ILauncher } from '@jupyterlab/launcher';
import { SplitPanel, Widget } from '@lumino/widgets';

import { attempt } from './attempt';
import type { IFields, LaunchModel } from './launch';
import type { JobList } from './joblist';
import type { JobsModel } from './jobs';
import type { Stops } from './stops';
import { chipIcon, CommandIDs, IGpuModel } from './tokens';
import { IJob } from './wire';
import { trans } from './translate';

const RUNNABLE = /\.(ipynb|py|sh)$/;

export const jobsPlugin: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-gpushare:jobs',
  description: 'Runs notebooks and scripts as training jobs, and lists them.',
  autoStart: true,
  requires: [IGpuModel],
  optional: [ICommandPalette, ILauncher, IFileBrowserFactory, ILayoutRestorer],
  activate: (
    app: JupyterFrontEnd,
    gpu: IGpuModel,
    palette: ICommandPalette | null,
    launcher: ILauncher | null,
    browsers: IFileBrowserFactory | null,
    restorer: ILayoutRestorer | null
  ): void => {
    const jobs = new Jobs(app, gpu, browsers);
    const isOn = (): boolean => gpu.model.state.kind !== 'off';
    app.commands.addCommand(CommandIDs.launch, {
      label: args =>
        args['isLauncher'] || args['isMenu']
          ? trans.__('Training job')
          : trans.__('Run as training job…'),
      caption: trans.__('Run a notebook or a script on a GPU, without this page'),
      icon: chipIcon,
      isVisible: args => isOn() && (!args['isBrowser'] || jobs.chosenFile() !== null),
      execute: async args => {
        const fields = args['fields'] as Partial<IFields> | undefined;
        const path = args['path'] as string | undefined;
        const chosen = args['isBrowser']
          ? jobs.chosenFile()
          : args['isLauncher']
            ? null
            : await jobs.openFile();
        await jobs.launch(fields ?? (path || chosen ? { path: path ?? chosen! } : {}));
      }
    });
    app.commands.addCommand(CommandIDs.jobs, {
      label: trans.__('My training jobs'),
      caption: trans.__('What waits, runs and ended, with logs and reasons'),
      icon: chipIcon,
      isVisible: isOn,
      execute: args => jobs.open((args['job'] as string | undefined) ?? null)
    });
    for (const command of [CommandIDs.launch, CommandIDs.jobs]) {
      palette?.addItem({ command, category: trans.__('Shared GPU') });
    }
    void restorer?.restore(jobs.tracker, { command: CommandIDs.jobs, name: () => 'gpushare-jobs' });
    // The launcher has no entry until a broker is known.
    const offer = (): void => {
      if (gpu.model.state.kind === 'ready') {
        gpu.model.changed.disconnect(offer);
        launcher?.add({
          command: CommandIDs.launch,
          category: trans.__('Other'),
          rank: 10,
          args: { isLauncher: true }
        });
      }
    };
    gpu.model.changed.connect(offer);
  }
};

/** Gives each widget of the vertical split panel around `widget` the same height. */
function balancePanels(widget: Widget): void {
  for (let around = widget.parent; around !== null; around = around.parent) {
    if (around instanceof SplitPanel && around.orientation === 'vertical') {
      around.setRelativeSizes(around.widgets.map(() => 1));
      return;
    }
  }
}

class Jobs {
  constructor(
    private readonly _app: JupyterFrontEnd,
    private readonly _gpu: IGpuModel,
    private readonly _browsers: IFileBrowserFactory | null
  ) {}

  /** Shared by all lists of jobs, because a delayed stop outlives its list. */
  private _stops: Stops | null = null;
  /** The model of the list that was opened last. */
  private _list: JobsModel | null = null;

  readonly tracker = new WidgetTracker<MainAreaWidget<JobList>>({ namespace: 'gpushare-jobs' });

  /** Returns the file selected in the file browser, if it can be run. */
  chosenFile(): string | null {
    const items = Array.from(this._browsers?.tracker.currentWidget?.selectedItems() ?? []);
    const path = items.length === 1 ? items[0]!.path : '';
    return RUNNABLE.test(path) ? this._app.serviceManager.contents.localPath(path) : null;
  }

  /** Saves the open document and returns its file, if it can be run. */
  async openFile(): Promise<string | null> {
    const context = (this._app.shell.currentWidget as IDocumentWidget | null)?.context;
    if (context === undefined || !RUNNABLE.test(context.path ?? '')) {
      return null;
    }
    if (context.model.dirty) {
      await context.save();
    }
    return context.localPath;
  }

  /** Opens the dialog and notifies about the submitted job. */
  async launch(fields: Partial<IFields>): Promise<void> {
    const [launch, { showLaunchDialog }] = await Promise.all([
      import('./launch'),
      import('./launchdialog')
    ]);
    const { requests } = this._gpu;
    const model = new launch.LaunchModel({
      ...this._dialogOptions(),
      fields,
      launchForm: path => requests.launchForm(path),
      launch: (request, key) => requests.launch(request, key)
    });
    const job = await showLaunchDialog(model);
    // The element that opened the dialog may be gone.
    if (document.activeElement === document.body) {
      this._app.shell.currentWidget?.activate();
    }
    if (job !== null) {
      await this._submitted(job);
    }
  }

  /** Returns the options that every dialog about a job has. */
  private _dialogOptions(): Pick<LaunchModel.IOptions, 'offers' | 'projects' | 'isHidden'> {
    const { requests, model: gpu } = this._gpu;
    return {
      offers: query => requests.offers(query),
      projects: () => (gpu.state.kind === 'ready' ? gpu.state.status.projects.map(({ name }) => name) : []),
      isHidden: () => document.visibilityState === 'hidden'
    };
  }

  /** Opens the list, and selects a job unless it is null. */
  async open(job: string | null): Promise<void> {
    let widget = this.tracker.find(() => true);
    if (widget === undefined || widget.isDisposed) {
      widget = await this._create();
      void this.tracker.add(widget);
    }
    if (!widget.isAttached) {
      this._app.shell.add(widget, 'main');
      if (!widget.isAttached) {
        // Notebook 7 keeps its main area for one document and gives no height to the area below.
        this._app.shell.add(widget, 'down');
        balancePanels(widget);
      }
    }
    if (job !== null) {
      widget.content.select(job);
    }
    this._app.shell.activateById(widget.id);
  }

  private async _create(): Promise<MainAreaWidget<JobList>> {
    const [{ JobsModel }, { JobList }, { fieldsOf }, { Stops }] = await Promise.all([
      import('./jobs'),
      import('./joblist'),
      import('./launch'),
      import('./stops')
    ]);
    const { model, requests } = this._gpu;
    this._stops ??= new Stops(model, {
      send: job => this._try(async () => this._list?.put(await requests.cancelJob(job.id))),
      confirm: jobs => this._confirmStop(jobs),
      offerUndo: (jobs, undo) => this._offerUndo(jobs, undo)
    });
    const jobs = (this._list = new JobsModel(model, limit => requests.jobs(limit)));
    const content = new JobList(
      this._gpu,
      jobs,
      {
        submit: () => void this.launch({}),
        stops: this._stops,
        retry: job => this._try(async () => this._submitted(await requests.retryJob(job.id))),
        edit: job => void this._edit(job),
        neighbour: (job, step) => jobs.neighbour(job, step),
        move: async (job, step) => {
          const other = jobs.neighbour(job, step);
          if (other !== null) {
            await this._try(() => requests.placeJob(job.id, other.id, step));
            await jobs.refresh();
          }
        },
        duplicate: job => void this.launch(fieldsOf(job)),
        openOutput: path => void this._app.commands.execute('docmanager:open', { path }),
        requests
      },
    );
    const widget = new MainAreaWidget({ content });
    widget.id = 'gpushare-jobs';
    widget.title.label = trans.__('Training jobs');
    widget.title.icon = chipIcon;
    widget.title.closable = true;
    // The toolbar is empty.
    (widget.toolbar as Widget).hide();
    return widget;
  }

  /** Opens the dialog that changes a job in the queue. */
  private async _edit(job: IJob): Promise<void> {
    const { showEditDialog } = await import('./launchdialog');
    const { requests } = this._gpu;
    await showEditDialog(job, this._dialogOptions(), change => requests.changeJob(job.id, change));
    await this._gpu.model.refresh();
  }

  /** Asks whether to stop jobs, and says what would be lost. */
  private async _confirmStop(jobs: readonly IJob[]): Promise<boolean> {
    const { lossOf } = await import('./jobmarks');
    const isOne = jobs.length === 1;
    const answer = await showDialog({
      title: isOne ? trans.__('Stop %1?', jobs[0]!.name) : trans._n('Stop %1 job?', 'Stop %1 jobs?', jobs.length),
      body: lossOf(jobs),
      // The second click of a double click on "Stop" hits outside the dialog and must not close it.
      hasClose: false,
      defaultButton: 0,
      buttons: [
        Dialog.cancelButton({ label: isOne ? trans.__('Let it go on') : trans.__('Let them go on') }),
        Dialog.warnButton({ label: isOne ? trans.__('Stop job') : trans.__('Stop jobs') })
      ]
    });
    return answer.button.accept;
  }

  /** Offers to undo a stop; returns the function that removes the offer. */
  private _offerUndo(jobs: readonly IJob[], undo: () => void): () => void {
    const message =
      jobs.length === 1
        ? trans.__('%1 leaves the queue.', jobs[0]!.name)
        : trans._n('%1 job leaves the queue.', '%1 jobs leave the queue.', jobs.length);
    const id = Notification.info(message, {
      autoClose: false,
      actions: [{ label: trans.__('Undo'), displayType: 'accent', callback: undo }]
    });
    return () => Notification.dismiss(id);
  }

  private async _submitted(job: IJob): Promise<void> {
    Notification.success(trans.__('Submitted %1. %2', job.name, job.reason), {
      autoClose: 8000,
      actions: [{ label: trans.__('Show job'), callback: () => void this.open(job.id) }]
    });
    await this._gpu.model.refresh();
  }

  private async _try(action: () => Promise<unknown>): Promise<void> {
    if (await attempt(action)) {
      await this._gpu.model.refresh();
    }
  }
}
