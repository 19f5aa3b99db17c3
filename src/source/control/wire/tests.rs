use std::time::Instant;

use super::*;

/// A daemon of a test, serving one session in a thread of its own.
struct FakeDaemon {
    listener: OwnedFd,
}

impl FakeDaemon {
    fn listen(pipe: &Path) -> FakeDaemon {
        std::fs::create_dir_all(pipe).unwrap();
        let listener = seqpacket::listen(&pipe.join("control_privileged")).unwrap();
        FakeDaemon { listener }
    }

    /// Says hello, then answers each command by `answer`, whose `None` is silence for ever. Gives what it was sent.
    fn serve(
        self,
        hello: &'static [u8],
        answer: fn(&str) -> Option<&'static [&'static str]>,
    ) -> std::thread::JoinHandle<Vec<String>> {
        std::thread::spawn(move || {
            let peer = seqpacket::accept(&self.listener).unwrap();
            let send = |packet: &[u8]| seqpacket::send(&peer, packet, Attachment::None).unwrap();
            send(hello);
            let mut heard = Vec::new();
            let packet = || seqpacket::receive(&peer).ok().map(|packet| packet.bytes);
            let Some(credentials) = packet() else { return heard };
            assert_eq!(credentials, CREDENTIALS);
            assert_eq!(packet().unwrap(), USER_INTERFACE.to_le_bytes());
            while let Some(length) = packet() {
                if length == 0_u64.to_le_bytes() {
                    let end = [KIND_END.to_le_bytes(), 0_u32.to_le_bytes()].concat();
                    send(&end);
                    break;
                }
                let command = packet().unwrap();
                assert_eq!(length, (command.len() as u64).to_le_bytes());
                let command = String::from_utf8(command).unwrap().trim_end_matches(['\n', '\0']).to_owned();
                if let Some(lines) = answer(&command) {
                    for line in lines {
                        let packet = [&KIND_LINE.to_le_bytes(), line.as_bytes(), b"\0"].concat();
                        send(&packet);
                    }
                }
                heard.push(command);
            }
            heard
        })
    }
}

#[allow(clippy::unnecessary_wraps)]
fn one_server(command: &str) -> Option<&'static [&'static str]> {
    match command {
        "get_server_list" => Some(&["77"]),
        "get_default_active_thread_percentage" => Some(&["100.0"]),
        "get_server_status 77" => Some(&["ACTIVE"]),
        "get_client_list 77" => Some(&["100"]),
        "ps -p 77" => Some(&["PID ID SERVER DEVICE NAMESPACE COMMAND\n", "100 1 77 GPU-aa-bb-cc 7 app\n"]),
        _ => Some(&["Unknown command \"?\""]),
    }
}

fn hung_server(command: &str) -> Option<&'static [&'static str]> {
    one_server(command).filter(|_| !command.contains("77"))
}

const LONG: Duration = Duration::from_secs(10);

#[tokio::test]
async fn a_session_asks_and_reads_everything() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = FakeDaemon::listen(directory.path()).serve(HELLO, one_server);
    let seen = look(directory.path(), Depth::Full, LONG).await.unwrap();
    assert_eq!(seen.servers[0].contexts.as_ref().unwrap()[0].pid, 100);
    assert_eq!(daemon.join().unwrap().len(), 6);
}

#[tokio::test]
async fn a_path_longer_than_a_socket_address_works() {
    let directory = tempfile::tempdir().unwrap();
    let pipe = directory.path().join("d".repeat(120)).join("non utf-8 blank");
    let daemon = FakeDaemon::listen(&pipe).serve(HELLO, one_server);
    assert_eq!(look(&pipe, Depth::State, LONG).await.unwrap().servers.len(), 1);
    daemon.join().unwrap();
}

#[tokio::test]
async fn an_unknown_handshake_is_told_and_never_answered() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = FakeDaemon::listen(directory.path()).serve(b"OUTBHEL2\0", one_server);
    let error = look(directory.path(), Depth::Full, LONG).await.unwrap_err();
    assert!(matches!(&error, WireError::UnknownProtocol { began, .. } if began.starts_with("OUTBHEL2")));
    assert_eq!(daemon.join().unwrap(), Vec::<String>::new());
}

#[tokio::test]
async fn a_daemon_that_never_accepts_times_out() {
    let directory = tempfile::tempdir().unwrap();
    let _daemon = FakeDaemon::listen(directory.path());
    let begun = Instant::now();
    // The backlog is small: the later ones cannot even connect.
    for _ in 0..4 {
        let error = look(directory.path(), Depth::Full, Duration::from_millis(60)).await.unwrap_err();
        assert!(matches!(&error, WireError::Timeout { awaited, .. } if awaited == "hello"), "{error}");
    }
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[tokio::test]
async fn a_hung_server_is_left_with_one_question() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = FakeDaemon::listen(directory.path()).serve(HELLO, hung_server);
    let error = look(directory.path(), Depth::Full, Duration::from_millis(200)).await.unwrap_err();
    assert!(error.to_string().contains("get_server_status 77"), "{error}");
    let heard = daemon.join().unwrap();
    assert_eq!(heard.iter().filter(|command| command.contains("77")).count(), 1, "{heard:?}");
}

#[tokio::test]
async fn an_absent_daemon_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let error = look(directory.path(), Depth::Full, LONG).await.unwrap_err();
    assert!(matches!(error, WireError::Connect { .. }));
    // A killed daemon leaves its socket.
    drop(FakeDaemon::listen(directory.path()));
    let error = look(directory.path(), Depth::Full, LONG).await.unwrap_err();
    assert!(matches!(error, WireError::Connect { .. }));
}
