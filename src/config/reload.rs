//! Reads the configuration file again when it changes or when asked to. A file that is wrong changes nothing.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tracing::{error, info};

use super::{Config, ConfigError};
use crate::source::Shutdown;
use crate::telemetry::Telemetry;

/// How often the file is looked at. One `stat`, which follows the symbolic links of a Kubernetes config map.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);

/// What tells a changed file without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    fn of(path: &Path) -> Option<Stamp> {
        let meta = std::fs::metadata(path).ok()?;
        Some(Stamp {
            device: meta.dev(),
            inode: meta.ino(),
            size: meta.size(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        })
    }
}

/// Keeps the configuration in step with its file.
#[derive(Debug)]
pub struct Reload {
    path: PathBuf,
    current: watch::Sender<Arc<Config>>,
    stamp: Option<Stamp>,
    /// Hash of the text that was read last, good or bad; `None` when there was no text.
    text: Option<u64>,
    request: Arc<Notify>,
    telemetry: Telemetry,
}

/// Asks for a reload (SIGHUP).
#[derive(Debug, Clone)]
pub struct ReloadRequest(Arc<Notify>);

impl ReloadRequest {
    /// The file is read again soon, whether or not it looks changed.
    pub fn now(&self) {
        self.0.notify_one();
    }
}

impl Reload {
    /// Loads the file for the first time. The receiver always holds the newest good configuration.
    pub fn load(
        path: &Path,
        telemetry: Telemetry,
    ) -> Result<(Reload, watch::Receiver<Arc<Config>>), ConfigError> {
        // Before the read: a change during it is then seen at the next look.
        let stamp = Stamp::of(path);
        let text = Config::read(path)?;
        let config = Config::parse(&text, &path.display().to_string())?;
        let (current, receiver) = watch::channel(Arc::new(config));
        let reload = Reload {
            path: path.to_owned(),
            current,
            stamp,
            text: Some(hash(&text)),
            request: Arc::default(),
            telemetry,
        };
        Ok((reload, receiver))
    }

    /// For the signal handler.
    pub fn request(&self) -> ReloadRequest {
        ReloadRequest(Arc::clone(&self.request))
    }

    /// Looks at the file until the program stops.
    pub async fn run(mut self, mut shutdown: Shutdown) {
        let mut looks = tokio::time::interval(LOOK_INTERVAL);
        looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = shutdown.wait() => return,
                () = self.request.notified() => self.reload(),
                _ = looks.tick() => self.reload_if_changed(),
            }
        }
    }

    fn reload_if_changed(&mut self) {
        let stamp = Stamp::of(&self.path);
        if stamp == self.stamp {
            return;
        }
        self.stamp = stamp;
        let read = Config::read(&self.path);
        let text = read.as_ref().ok().map(|text| hash(text));
        // Touched, or moved away and back: the same text says nothing new.
        if text != self.text {
            self.take(read);
        }
    }

    fn reload(&mut self) {
        self.stamp = Stamp::of(&self.path);
        let read = Config::read(&self.path);
        self.take(read);
    }

    fn take(&mut self, read: Result<String, ConfigError>) {
        self.text = read.as_ref().ok().map(|text| hash(text));
        let parsed = read.and_then(|text| Config::parse(&text, &self.path.display().to_string()));
        let file = self.path.display();
        match parsed {
            Ok(config) => {
                let config = Arc::new(config);
                let is_new = self.current.send_if_modified(|current| {
                    let is_new = *current != config;
                    *current = Arc::clone(&config);
                    is_new
                });
                self.telemetry.config_reload(true);
                info!(%file, changed = is_new, "The configuration was read again.");
            }
            Err(error) => {
                self.telemetry.config_reload(false);
                error!(%file, %error, "The new configuration was refused, the old one stays in force.");
            }
        }
    }
}

fn hash(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reloads(telemetry: &Telemetry, result: &str) -> f64 {
        let families = telemetry.registry().gather();
        families
            .iter()
            .filter(|family| family.name() == "mps_exporter_config_reloads_total")
            .flat_map(prometheus::proto::MetricFamily::get_metric)
            .filter(|metric| metric.get_label()[0].value() == result)
            .map(|metric| metric.get_counter().get_value())
            .sum()
    }

    #[tokio::test(start_paused = true)]
    async fn a_good_file_is_taken_and_a_bad_one_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.yml");
        std::fs::write(&path, "nvml: {interval: 20s}\n").unwrap();
        let telemetry = Telemetry::new();
        let (reload, mut current) = Reload::load(&path, telemetry.clone()).unwrap();
        let request = reload.request();
        let (_switch, shutdown) = Shutdown::new();
        let running = tokio::spawn(reload.run(shutdown));
        assert_eq!(current.borrow_and_update().nvml.interval, Duration::from_secs(20));

        std::fs::write(&path, "nvml: {interval: 30s} # longer\n").unwrap();
        current.changed().await.unwrap();
        assert_eq!(current.borrow_and_update().nvml.interval, Duration::from_secs(30));

        std::fs::write(&path, "nvml: {interval: never}\n").unwrap();
        tokio::time::sleep(LOOK_INTERVAL * 3).await;
        assert!(!current.has_changed().unwrap());
        assert_eq!(current.borrow().nvml.interval, Duration::from_secs(30));
        assert_eq!(
            reloads(&telemetry, "refused").to_bits(),
            1_f64.to_bits(),
            "refused once, not at every look"
        );

        std::fs::remove_file(&path).unwrap();
        // Not on a look's instant: the request that follows shall be alone.
        tokio::time::sleep(LOOK_INTERVAL * 7 / 2).await;
        assert_eq!(reloads(&telemetry, "refused").to_bits(), 2_f64.to_bits());

        std::fs::write(&path, "nvml: {interval: 30s}\n").unwrap();
        request.now();
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert!(!current.has_changed().unwrap(), "the same configuration is no news");
        assert_eq!(reloads(&telemetry, "accepted").to_bits(), 2_f64.to_bits());
        running.abort();
    }
}
