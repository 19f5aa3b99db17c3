//! What systemd is told, where it asked to be (`Type=notify`, `WatchdogSec=`).

use sd_notify::NotifyState;

/// The exporter serves.
pub fn ready() {
    tell(&[NotifyState::Ready]);
}

/// The exporter is on its way out.
pub fn stopping() {
    tell(&[NotifyState::Stopping]);
}

/// Tells that the exporter's thread still turns, twice as often as systemd asked for. Ends at once when it did not.
pub async fn watchdog() {
    let Some(patience) = sd_notify::watchdog_enabled() else { return };
    let mut ticks = tokio::time::interval(patience / 2);
    loop {
        ticks.tick().await;
        tell(&[NotifyState::Watchdog]);
    }
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "systemd could not be told.");
    }
}
