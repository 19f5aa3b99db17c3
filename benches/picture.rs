//! Time to take a picture of the model, which every change costs: `cargo bench --bench picture`.
//!
//! `one` has a client on one GPU, `coupled` has a tenth of them on two. `fault` is the whole story of a fault that takes
//! every client of a server: its lines, a picture after each, and the ends of all processes.
#![allow(missing_docs, clippy::unwrap_used)]

mod story;

use std::hint::black_box;
use std::time::{Duration, Instant};

use mps_exporter::event::{EventKind, LogMessage};
use mps_exporter::identity::{DeviceName, ProcessId};
use story::{DAEMON, Story};

const SERVER: u32 = 4000;
const FIRST_CLIENT: u32 = 5000;
const ROUNDS: usize = 200;

fn main() {
    println!("{:<12} {:>8} {:>8} {:>12} {:>12}", "GPUs", "clients", "", "p50", "p99");
    for (gpus, per_gpu) in [(8, 48), (64, 30), (8, 375)] {
        for (kind, couple_every) in [("one", None), ("coupled", Some(10))] {
            let crowd = Crowd::new(gpus, gpus * per_gpu, couple_every);
            let mut times: Vec<Duration> = (0..ROUNDS)
                .map(|_| {
                    let start = Instant::now();
                    black_box(crowd.story.node.snapshot());
                    start.elapsed()
                })
                .collect();
            times.sort();
            let (middle, late) = (times[ROUNDS / 2], times[ROUNDS * 99 / 100]);
            println!("{gpus:<12} {:>8} {kind:>8} {middle:>12.1?} {late:>12.1?}", gpus * per_gpu);
        }
        let mut crowd = Crowd::new(gpus, gpus * per_gpu, None);
        let start = Instant::now();
        crowd.fault();
        println!("{gpus:<12} {:>8} {:>8} {:>12.1?}", gpus * per_gpu, "fault", start.elapsed());
    }
}

/// A node with one server.
struct Crowd {
    story: Story,
    clients: std::ops::Range<u32>,
}

impl Crowd {
    fn new(gpus: u32, clients: u32, couple_every: Option<u32>) -> Crowd {
        let clients = FIRST_CLIENT..FIRST_CLIENT + clients;
        let mut crowd = Crowd { story: Story::new(100), clients: clients.clone() };
        crowd.story.log(DAEMON, LogMessage::ServerStarting { pid: SERVER, uid: 1000 }, "");
        crowd.story.log(DAEMON, LogMessage::ServerReady { pid: SERVER }, "");
        for pid in clients {
            let gpu = pid % gpus;
            crowd.context(pid, 1, gpu);
            if couple_every.is_some_and(|every| pid % every == 0) {
                crowd.context(pid, 2, (gpu + 1) % gpus);
            }
            crowd.story.seen(ProcessId { pid, start: 1 }, u64::from(pid / 4));
        }
        crowd
    }

    fn context(&mut self, pid: u32, context: u32, gpu: u32) {
        let uuid = format!("GPU-{gpu:08x}-aaaa-bbbb-cccc-dddddddddddd");
        let device = DeviceName::Uuid(uuid.into());
        self.story.log(SERVER, LogMessage::DeviceAssociated { device }, "");
        self.story.log(SERVER, LogMessage::ContextActive { pid, context }, "");
    }

    fn fault(&mut self) {
        self.told(LogMessage::ClientFault { pid: self.clients.start });
        self.told(LogMessage::ServerFault);
        for pid in self.clients.clone() {
            self.told(LogMessage::ContextInactive { pid, context: 1 });
        }
        self.told(LogMessage::FaultDevice { ordinal: 0 });
        for pid in self.clients.clone() {
            self.story.tell(EventKind::ProcessExited { daemon: self.story.daemon.clone(), pid });
            self.look();
        }
    }

    fn told(&mut self, message: LogMessage) {
        self.story.log(SERVER, message, "");
        self.look();
    }

    /// What the owner does after every batch.
    fn look(&mut self) {
        self.story.at = self.story.at.after(Duration::from_micros(10));
        black_box(self.story.node.take_effects());
        black_box(self.story.node.snapshot());
    }
}
