//! The running exporter: sources, the model's owner, outlets and the web server, put together.

mod exporter;
pub mod look;
mod owner;
mod sources;
mod systemd;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use crate::cli::serve::Serve;
use crate::config::{Config, ConfigError, Reload, ReloadRequest};
use crate::source::Shutdown;
use crate::telemetry::Telemetry;
use exporter::Exporter;

/// The configuration of a run, and how it changes.
pub struct Configuration {
    current: watch::Receiver<Arc<Config>>,
    change: Change,
}

/// How a configuration changes.
enum Change {
    /// With its file.
    Reload(Reload),
    /// Never. The sender is kept, so that nobody who waits for a change sees the end of it.
    Never(watch::Sender<Arc<Config>>),
}

impl Configuration {
    /// From a file that is watched, or the defaults.
    ///
    /// # Errors
    /// When the file cannot be read or is wrong; the message shows where.
    pub fn open(file: Option<&Path>, telemetry: &Telemetry) -> Result<Configuration, ConfigError> {
        let Some(path) = file else { return Ok(Configuration::fixed(Config::default())) };
        let (reload, current) = Reload::load(path, telemetry.clone())?;
        Ok(Configuration { current, change: Change::Reload(reload) })
    }

    /// One that never changes.
    pub fn fixed(config: Config) -> Configuration {
        let (never, current) = watch::channel(Arc::new(config));
        Configuration { current, change: Change::Never(never) }
    }
}

/// Until then every source has looked for the first time.
const START_TAKES: Duration = Duration::from_secs(3);

/// Runs the exporter until `shutdown` or a signal tells it to stop.
///
/// # Errors
/// When it cannot start: an address in use, a wrong web configuration, a wrong Xid catalogue.
pub async fn run(
    options: &Serve,
    configuration: Configuration,
    telemetry: Telemetry,
    mut shutdown: Shutdown,
) -> anyhow::Result<()> {
    let Configuration { current: mut configs, change } = configuration;
    let mut signals = Signals::new()?;
    let mut exporter = Exporter::start(options, configs.borrow_and_update().clone(), telemetry).await?;
    let (stop, stopped) = Shutdown::new();
    let (reload, _never) = match change {
        Change::Reload(reload) => {
            let request = reload.request();
            tokio::spawn(reload.run(stopped.clone()));
            (Some(request), None)
        }
        Change::Never(never) => (None, Some(never)),
    };
    systemd::ready();
    tokio::spawn(async {
        tokio::time::sleep(START_TAKES).await;
        crate::sys::code::release_code();
    });
    let watchdog = tokio::spawn(systemd::watchdog());
    loop {
        tokio::select! {
            () = shutdown.wait() => break,
            heard = signals.next() => match heard {
                Heard::Stop => break,
                Heard::Reload => {
                    exporter.reload_web();
                    reload.as_ref().map(ReloadRequest::now);
                }
            },
            Ok(()) = configs.changed() => {
                let config = configs.borrow_and_update().clone();
                exporter.reconfigure(config).await;
            }
        }
    }
    tracing::info!("Stopping.");
    systemd::stopping();
    watchdog.abort();
    stop.send_replace(true);
    tokio::select! {
        ended = exporter.stop() => ended,
        () = signals.stop() => anyhow::bail!("told twice to stop: ended without saving the last state"),
    }
}

/// Signals that the exporter obeys.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Signals> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        Ok(Signals {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }

    /// The next one of them.
    async fn next(&mut self) -> Heard {
        tokio::select! {
            _ = self.terminate.recv() => Heard::Stop,
            _ = self.interrupt.recv() => Heard::Stop,
            _ = self.hangup.recv() => Heard::Reload,
        }
    }

    /// Completes when told to stop.
    async fn stop(&mut self) {
        while self.next().await != Heard::Stop {}
    }
}

/// What a signal means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Heard {
    /// SIGTERM or SIGINT: end.
    Stop,
    /// SIGHUP: read the configuration again.
    Reload,
}
