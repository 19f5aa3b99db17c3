//! A test bed: NVIDIA's own control daemon, without a GPU.
//!
//! `scripts/get-mps-daemons` fetches the daemons. What they launch in place of NVIDIA's server is this test binary
//! itself ([`server`]), and so are the clients that connect to them ([`client`]): no second program has to be built or found. A
//! test file that uses the bed names the two entries with [`entries!`].

#![allow(dead_code)]

pub mod bed;
pub mod client;
pub mod server;

/// The tests that are not tests: what a test binary does when the bed starts it as a server or a client.
macro_rules! entries {
    () => {
        #[test]
        #[ignore = "run by the test bed, as an MPS server"]
        fn mps_server() {
            mps::server::run();
        }

        #[test]
        #[ignore = "run by the test bed, as an MPS client"]
        fn mps_client() {
            mps::client::run();
        }
    };
}
pub(crate) use entries;

/// What a control daemon says first, to whomever.
pub const HELLO: &[u8] = b"OUTBHELL\0";
/// What is said to it first.
pub const CREDENTIALS: &[u8] = b"OUTBCRED\0";
/// What hands a client's end of a connection over.
pub const HANDOVER: &[u8] = b"OUTBCUFD\0";
/// The variable that names the bed's directory to servers and clients.
pub const BED: &str = "MPS_BED";
