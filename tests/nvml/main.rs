//! The NVML source against the stand-in library and against NVIDIA's own without a driver.
#![allow(missing_docs, clippy::unwrap_used)]

mod calls;
mod events;
#[path = "../support/program.rs"]
mod program;
mod real;
mod rig;
mod scrapes;
mod session;
mod values;

/// Two GPUs: one with MPS clients, one with two MIG instances of which one has a client.
const GPUS: &str = r#"
driver 580.65.06
gpu index=0 uuid=GPU-aaaa pci=0000:3b:00.0 name="NVIDIA A100-SXM4-40GB" mode=exclusive_process mig=off cc=8.0 recovery=3
compute gpu=0 pid=700 memory=300
mps gpu=0 pid=711 memory=1000
mps gpu=0 pid=712 memory=none
mps gpu=0 pid=713 memory=3000
gpu index=1 uuid=GPU-bbbb pci=0000:86:00.0 name="NVIDIA A100-SXM4-40GB" mig=on
mig gpu=1 slot=0 uuid=MIG-b0 gi=1 ci=0 profile=3g.20gb mode=exclusive_process
mig gpu=1 slot=2 uuid=MIG-b2 gi=2 ci=0 profile=1c.3g.20gb
mps gpu=1 pid=811 memory=500 gi=1 ci=0
compute gpu=1 pid=900 memory=70 gi=2 ci=0
"#;
