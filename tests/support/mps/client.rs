//! Connects to a control daemon as a CUDA program does, and stays until it is killed or its server is gone.

use std::path::PathBuf;

use mps_exporter::sys::seqpacket::{self, Attachment};

use super::{CREDENTIALS, HANDOVER, HELLO};

/// Connection type of a CUDA client.
const CLIENT: u32 = 2;

/// Says on standard output how far it is: `waiting` once the daemon knows it, `connected` once a server has it.
pub fn run() {
    let pipe = PathBuf::from(std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").unwrap());
    let daemon = seqpacket::socket(true).unwrap();
    seqpacket::connect(&daemon, &pipe.join("control")).unwrap();
    assert_eq!(seqpacket::receive_bytes(&daemon).unwrap(), HELLO);
    seqpacket::send(&daemon, CREDENTIALS, Attachment::Credentials).unwrap();
    seqpacket::send(&daemon, &CLIENT.to_le_bytes(), Attachment::None).unwrap();
    println!("waiting");
    let packet = seqpacket::receive(&daemon).unwrap();
    assert_eq!(packet.bytes, HANDOVER);
    let server = packet.descriptor.unwrap();
    // The daemon serves nobody else before this.
    drop(daemon);
    seqpacket::send(&server, b"hello", Attachment::Credentials).unwrap();
    println!("connected");
    while seqpacket::receive_bytes(&server).is_ok() {}
}
