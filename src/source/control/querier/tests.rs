use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tokio::sync::mpsc::Receiver;

use super::*;
use crate::event::{Event, LogPlace};
use crate::identity::ProcessId;
use crate::sys::seqpacket::{self, Attachment};
use crate::time::Clock;

const HELD: LockState = LockState::Held(ProcessId { pid: 1, start: 1 });

/// A querier of the daemon of `pipe`, with NVIDIA's program looked for in `search`.
struct Asked {
    queue: Receiver<Vec<Event>>,
    requests: Arc<Notify>,
    state: watch::Sender<Option<LockState>>,
    unanswered: watch::Receiver<u32>,
    telemetry: Telemetry,
    _stop: watch::Sender<bool>,
}

fn ask(pipe: &Path, search: &Path, timeout: Duration) -> Asked {
    let (outbox, queue) = Outbox::new(Clock::new());
    let requests = Arc::new(Notify::new());
    let (state, state_seen) = watch::channel(Some(HELD));
    let (unanswered, unanswered_seen) = watch::channel(0);
    let telemetry = Telemetry::new();
    let (stop, shutdown) = Shutdown::new();
    let querier = Querier {
        site: DaemonSite {
            name: "default".into(),
            pipe_directory: pipe.into(),
            log_directory: pipe.into(),
            root: PathBuf::new(),
            process: None,
            started_at: None,
            log: LogPlace::Files,
            visible_devices: None,
            is_configured: true,
        },
        settings: Control { timeout, ..Control::default() },
        proc: ProcRoot::new("/proc"),
        outbox,
        telemetry: telemetry.clone(),
        requests: requests.clone(),
        state: state_seen,
        unanswered,
        client: ControlClient::Socket,
        search: Some(search.into()),
        health: None,
    };
    tokio::spawn(querier.run(shutdown));
    Asked { queue, requests, state, unanswered: unanswered_seen, telemetry, _stop: stop }
}

impl Asked {
    async fn next(&mut self) -> Result<Look, LookError> {
        loop {
            let batch = tokio::time::timeout(Duration::from_secs(20), self.queue.recv()).await.unwrap();
            for event in batch.unwrap() {
                if let EventKind::Look(_, result) = event.kind {
                    return result;
                }
            }
        }
    }

    fn count(&self, result: &str) -> u64 {
        let families = self.telemetry.registry().gather();
        let queries = families.iter().find(|family| family.name() == "mps_control_queries_total").unwrap();
        let series = queries
            .get_metric()
            .iter()
            .find(|metric| metric.get_label().iter().any(|label| label.value() == result));
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        series.map_or(0, |metric| metric.get_counter().get_value() as u64)
    }
}

#[tokio::test]
async fn an_unknown_handshake_makes_it_ask_through_the_program() {
    let pipe = tempfile::tempdir().unwrap();
    let listener = seqpacket::listen(&pipe.path().join("control_privileged")).unwrap();
    std::thread::spawn(move || {
        while let Ok(caller) = seqpacket::accept(&listener) {
            seqpacket::send(&caller, b"OUTB-NEW\0", Attachment::None).unwrap();
        }
    });
    let mut asked = ask(pipe.path(), pipe.path(), Duration::from_secs(10));
    let error = asked.next().await.unwrap_err();
    assert!(error.to_string().contains("no nvidia-cuda-mps-control"), "{error}");

    let program = pipe.path().join(binary::PROGRAM);
    std::fs::write(&program, "#!/bin/sh\necho 100.0\n").unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let look = asked.next().await.unwrap();
    assert_eq!(look.protocol.as_deref(), Some("binary"));
    assert_eq!((asked.count("error"), asked.count("ok")), (1, 1));
}

#[tokio::test]
async fn silence_is_counted_and_forgotten_with_another_daemon() {
    let pipe = tempfile::tempdir().unwrap();
    let listener = seqpacket::listen(&pipe.path().join("control_privileged")).unwrap();
    let mut asked = ask(pipe.path(), pipe.path(), Duration::from_millis(50));
    for unanswered in 1..=3 {
        assert!(matches!(asked.next().await, Err(LookError::Timeout(_))));
        asked.requests.notify_one(); // changes nothing
        asked.unanswered.wait_for(|count| *count == unanswered).await.unwrap();
    }
    assert_eq!(asked.count("timeout"), 3);

    // Of a daemon in another pid namespace only this is known, of its successor too.
    asked.state.send_replace(Some(LockState::HeldElsewhere));
    asked.unanswered.wait_for(|count| *count == 0).await.unwrap();
    assert!(matches!(asked.next().await, Err(LookError::Timeout(_))));
    assert_eq!(*asked.unanswered.borrow(), 1);

    // A dead daemon is not asked at all.
    asked.state.send_replace(Some(LockState::Stale));
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(asked.count("timeout"), 4);

    drop(listener);
    asked.state.send_replace(Some(LockState::HeldElsewhere));
    assert!(matches!(asked.next().await, Err(LookError::Refused(_))));
    assert_eq!(*asked.unanswered.borrow(), 0);
}
