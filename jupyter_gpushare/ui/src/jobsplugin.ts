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
import { ITranslator, nullTranslator, TranslationBundle } from '@jupyterlab/translation';
import { SplitPanel, Widget } from '@lumino/widgets';

import type { IFields } from './launch';
import type { JobList } from './joblist';
import type { Stops } from './stops';
import { chipIcon, CommandIDs, IGpuModel } from './tokens';
import { stopText } from './messages';
import { IJob } from './wire';

const RUNNABLE = /\.(ipynb|py|sh)$/;

export const jobsPlugin: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-gpushare:jobs',
  description: 'Runs notebooks and scripts as training jobs, and lists them.',
  autoStart: true,
  requires: [IGpuModel],
  optional: [ITranslator, ICommandPalette, ILauncher, IFileBrowserFactory, ILayoutRestorer],
  activate: (
    app: JupyterFrontEnd,
    gpu: IGpuModel,
    translator: ITranslator | null,
    palette: ICommandPalette | null,
    launcher: ILauncher | null,
    browsers: IFileBrowserFactory | null,
    restorer: ILayoutRestorer | null
  ): void => {
    const trans = (translator ?? nullTranslator).load('jupyter_gpushare');
    const jobs = new Jobs(app, gpu, trans, browsers);
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
    // Not before it is known that there is a broker.
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
    private readonly _trans: TranslationBundle,
    private readonly _browsers: IFileBrowserFactory | null
  ) {}

  /** Of all lists of jobs, one after the other: what is held back outlives a list. */
  private _stops: Stops | null = null;

  readonly tracker = new WidgetTracker<MainAreaWidget<JobList>>({ namespace: 'gpushare-jobs' });

  /** The file that is selected in the file browser, if it can be run. */
  chosenFile(): string | null {
    const items = Array.from(this._browsers?.tracker.currentWidget?.selectedItems() ?? []);
    const path = items.length === 1 ? items[0]!.path : '';
    return RUNNABLE.test(path) ? this._app.serviceManager.contents.localPath(path) : null;
  }

  /** The file of the open document, saved, if it can be run. */
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

  /** Opens the dialog; tells what was submitted. */
  async launch(fields: Partial<IFields>): Promise<void> {
    const [{ LaunchModel }, { showLaunchDialog }] = await Promise.all([
      import('./launch'),
      import('./launchdialog')
    ]);
    const { requests, model: gpu } = this._gpu;
    const model = new LaunchModel({
      trans: this._trans,
      fields,
      launchForm: path => requests.launchForm(path),
      offers: query => requests.offers(query),
      launch: (request, key) => requests.launch(request, key),
      projects: () => (gpu.state.kind === 'ready' ? gpu.state.status.projects.map(({ name }) => name) : []),
      isHidden: () => document.visibilityState === 'hidden'
    });
    const job = await showLaunchDialog(model, this._trans);
    // What the dialog was opened from may be gone.
    if (document.activeElement === document.body) {
      this._app.shell.currentWidget?.activate();
    }
    if (job !== null) {
      await this._submitted(job);
    }
  }

  /** Opens the list, with a job if one is named. */
  async open(job: string | null): Promise<void> {
    let widget = this.tracker.find(() => true);
    if (widget === undefined || widget.isDisposed) {
      widget = await this._create();
      void this.tracker.add(widget);
    }
    if (!widget.isAttached) {
      this._app.shell.add(widget, 'main');
      if (!widget.isAttached) {
        // Notebook 7 keeps its main area for one document, and gives no height to what is below it.
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
      send: job => this._try(() => requests.cancelJob(job.id)),
      confirm: job => this._confirmStop(job),
      offerUndo: (job, undo) => this._offerUndo(job, undo)
    });
    const jobs = new JobsModel(model, limit => requests.jobs(limit));
    const content = new JobList(
      model,
      jobs,
      {
        submit: () => void this.launch({}),
        stops: this._stops,
        retry: job => this._try(async () => this._submitted(await requests.retryJob(job.id))),
        duplicate: job => void this.launch(fieldsOf(job)),
        openOutput: path => void this._app.commands.execute('docmanager:open', { path }),
        readLog: (job, attempt, offset) => requests.log(job, attempt, offset),
        logUrl: (job, attempt) => requests.logUrl(job, attempt),
        timeline: async job => (await requests.timeline(job)).moments
      },
      this._trans
    );
    const widget = new MainAreaWidget({ content });
    widget.id = 'gpushare-jobs';
    widget.title.label = this._trans.__('Training jobs');
    widget.title.icon = chipIcon;
    widget.title.closable = true;
    // The toolbar of a main area widget would be empty.
    (widget.toolbar as Widget).hide();
    return widget;
  }

  /** Asks whether to stop a job, with what would be lost. */
  private async _confirmStop(job: IJob): Promise<boolean> {
    const trans = this._trans;
    const answer = await showDialog({
      title: trans.__('Stop %1?', job.name),
      body: stopText(trans, job),
      // The second of two clicks on "Stop" falls beside the dialog: it must not close it.
      hasClose: false,
      defaultButton: 0,
      buttons: [
        Dialog.cancelButton({ label: trans.__('Let it go on') }),
        Dialog.warnButton({ label: trans.__('Stop job') })
      ]
    });
    return answer.button.accept;
  }

  /** Offers to undo a stop; returns what takes the offer away. */
  private _offerUndo(job: IJob, undo: () => void): () => void {
    const trans = this._trans;
    const id = Notification.info(trans.__('%1 leaves the queue.', job.name), {
      autoClose: false,
      actions: [{ label: trans.__('Undo'), displayType: 'accent', callback: undo }]
    });
    return () => Notification.dismiss(id);
  }

  private async _submitted(job: IJob): Promise<void> {
    Notification.success(this._trans.__('Submitted %1. %2', job.name, job.reason), {
      autoClose: 8000,
      actions: [{ label: this._trans.__('Show job'), callback: () => void this.open(job.id) }]
    });
    await this._gpu.model.refresh();
  }

  private async _try(action: () => Promise<unknown>): Promise<void> {
    try {
      await action();
      await this._gpu.model.refresh();
    } catch (error) {
      Notification.error(error instanceof Error ? error.message : String(error), { autoClose: 8000 });
    }
  }
}
