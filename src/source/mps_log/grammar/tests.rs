use super::*;
use LogMessage as L;

fn says(tag: Tag, text: &str) -> Message<'_> {
    message(tag, text.as_bytes())
}

#[test]
fn control_messages() {
    for (text, expected) in [
        ("Starting control daemon using socket /tmp/nvidia-mps/control", L::DaemonStarted),
        ("Start", L::DaemonStarted),
        ("CUDA MPS Control binary version: 13000", L::DaemonVersion(13000)),
        ("NEW CLIENT 0 from user 1001: Server already exists", L::ClientAdmitted { pid: 0, uid: 1001 }),
        ("NEW CLIENT 4267 from user 1000", L::ClientAdmitted { pid: 4267, uid: 1000 }),
        (
            "NEW CLIENT 12 from user 0: Server is not ready, push client to pending list",
            L::ClientQueued { pid: 12, uid: 0 },
        ),
        ("Starting new server 337 for user 4294967294", L::ServerStarting { pid: 337, uid: 4_294_967_294 }),
        ("NEW SERVER 337: Ready", L::ServerReady { pid: 337 }),
        ("Server encountered a fatal exception. Shutting down", L::ServerBroke),
        ("Server 95 exited with status 1", L::ServerExited { pid: 95, status: 1 }),
        ("Server 95 exited with status -11", L::ServerExited { pid: 95, status: -11 }),
        ("Failed to start server using uid 7, error: Permission denied", L::ServerLaunchFailed { uid: 7 }),
        ("Try shutting down server 12, backoff is enabled", L::ServerAskedToLeave { pid: 12 }),
        ("Force shutting down server 12", L::ServerForcedToLeave { pid: 12 }),
        ("quit command issued with timeout of 0", L::DaemonStopping),
        ("The MPS control daemon is shutting down", L::DaemonStopping),
        ("An instance of this daemon is already running", L::Trouble(Trouble::AlreadyRunning)),
        ("Cannot access CUDA_MPS_PIPE_DIRECTORY=/x", L::Trouble(Trouble::PipeDirectory)),
        (
            "Insufficient privileges for UID 12. Only the root user may shutdown another user's server.",
            L::Trouble(Trouble::Privileges),
        ),
        (
            "Warning: Failed writing log files to directory [/x]. No logs will be available.",
            L::Trouble(Trouble::LogsUnwritable),
        ),
    ] {
        assert_eq!(says(Tag::Control, text).into_owned(), Some(expected), "{text}");
    }
}

#[test]
fn server_messages_of_every_generation() {
    let start_failed = |reason: &str| L::ServerStartFailed(reason.into());
    for (text, expected) in [
        ("Startup", L::ServerStartup),
        ("Start", L::ServerStartup),
        ("MPS Server connecting to control daemon on socket: /tmp/nvidia-mps/control", L::ServerStartup),
        ("Driver initialization failed with: no CUDA-capable device", start_failed("no CUDA-capable device")),
        ("Failed to start : invalid argument", start_failed("invalid argument")),
        ("Creating server context on device 0", L::ContextCreated { device: 0, name: None }),
        ("Volta MPS: Creating server context on device 1", L::ContextCreated { device: 1, name: None }),
        (
            "Creating server context on device 3 (NVIDIA H100 (80GB))",
            L::ContextCreated { device: 3, name: Some("NVIDIA H100 (80GB)".into()) },
        ),
        ("Volta MPS: Destroy server context on device 1", L::ContextDestroyed { device: 1 }),
        ("Server has started", L::ServerStarted),
        ("MPS Server is started", L::ServerStarted),
        ("CUDA MPS Server for Linux/Unix. Binary version: 13000", L::ServerVersion(13000)),
        ("Received new client request", L::ClientArriving),
        ("Volta MPS Server: Received new client request", L::ClientArriving),
        ("Received new client request for {PID: 4267, Context ID: 2}", L::ClientConnected { pid: 4267 }),
        ("Client {PID: 4267, Context ID: 0} connected", L::ClientConnected { pid: 4267 }),
        ("New client 4267 connected", L::ClientConnected { pid: 4267 }),
        ("Status of client {11661, 1} is ACTIVE", L::ContextActive { pid: 11661, context: 1 }),
        ("Volta MPS: status of client {11641, 1} is INACTIVE", L::ContextInactive { pid: 11641, context: 1 }),
        ("Client process disconnected", L::ClientLeftUnnamed { contexts_left: None }),
        ("Volta MPS: Client process disconnected", L::ClientLeftUnnamed { contexts_left: None }),
        (
            "Volta MPS: Client disconnected. Number of active client contexts is 2",
            L::ClientLeftUnnamed { contexts_left: Some(2) },
        ),
        (
            "Client disconnected. Device 0. Number of active client contexts is 0.",
            L::ClientLeftUnnamed { contexts_left: Some(0) },
        ),
        ("Client {11643, 2} exit", L::ClientLeft { pid: 11643, context: Some(2) }),
        ("Client {PID: 11643, Context ID: 2} exit", L::ClientLeft { pid: 11643, context: Some(2) }),
        ("Client 11643 disconnected", L::ClientLeft { pid: 11643, context: None }),
        ("Client process 11641 encountered a fatal GPU error.", L::ClientFault { pid: 11641 }),
        ("Server is handling a fatal GPU error.", L::ServerFault),
        ("Volta MPS: Server is handling a fatal GPU error.", L::ServerFault),
        ("Forcefully terminating client 12", L::ClientTerminating { pid: 12 }),
        ("Client termination failed with invalid value.", L::ClientTerminationFailed),
        ("Failed to terminate client {12, 1}.", L::ClientTerminationFailed),
        ("Worker is in reset.", L::ClientRejected(Rejection::InReset)),
        ("Teardown in progress, client creation denied", L::ClientRejected(Rejection::Teardown)),
        (
            "Failed to accept new client. Maximum number of clients (48) reached.",
            L::ClientRejected(Rejection::ClientLimit),
        ),
        (
            "Failed to accept new client. Reached maximum number of device connections.",
            L::ClientRejected(Rejection::DeviceConnectionLimit),
        ),
        ("User did not send valid credentials", L::ClientRejected(Rejection::Credentials)),
        ("Device (uuid GPU-1) is not supported by this MPS server", L::Trouble(Trouble::DeviceNotServed)),
        ("Pre-Volta device 0 is filtered out", L::Trouble(Trouble::DeviceNotServed)),
        ("MPS Server failed to create/open SHM segment.", L::Trouble(Trouble::SharedMemory)),
        ("Failed to create/open SHM segment.", L::Trouble(Trouble::SharedMemory)),
        (
            "Warning: File descriptor limit may be set too low, consider increasing it to 16384 or more",
            L::Trouble(Trouble::FileDescriptorLimit),
        ),
        ("Waiting for current clients to finish", L::ServerLeaving),
        ("Server has been notified to shutdown", L::ServerLeaving),
        ("Exiting", L::ServerLeaving),
    ] {
        assert_eq!(says(Tag::Server, text).into_owned(), Some(expected), "{text}");
    }
}

#[test]
fn a_device_is_named_by_its_uuid_or_not_at_all() {
    let device = |text| says(Tag::Server, text).into_owned();
    assert_eq!(
        device("Device Tesla T4 (uuid GPU-CB1213A3-d6a4-be7f-0011-223344556677) is associated"),
        Some(L::DeviceAssociated {
            device: DeviceName::Uuid("GPU-cb1213a3-d6a4-be7f-0011-223344556677".into())
        })
    );
    assert_eq!(
        device("Device H100 (SXM) (uuid MIG-cb1213a3-d6a4-be7f) is associated"),
        Some(L::DeviceAssociated { device: DeviceName::UuidPrefix("MIG-cb1213a3-d6a4-be7f".into()) })
    );
    // The order of the bytes in this form is not known.
    let old = "Volta MPS: Device Tesla T4 (uuid 0x1-0x2-0x3-0x4) is associated";
    assert_eq!(says(Tag::Server, old), Message::Noise);
}

#[test]
fn noise() {
    for (tag, text) in [
        (Tag::Control, "User did not send valid credentials"),
        (Tag::Control, "To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY=/x"),
        (Tag::Control, "NEW SERVER 12: Ignoring connection from user"),
        (Tag::Control, "NEW SERVER 12: Ignoring old connection request"),
        (Tag::Control, "Control will try shutting down server 12 again in at most 800ms"),
        (Tag::Control, "Server 12 has 3 active worker threads. Server will not shutdown."),
        (Tag::Control, "Removed Shm file at /dev/shm/x"),
        (Tag::Control, "Removed Shm file at"),
        (Tag::Control, "Exit with status 1"),
        (Tag::Control, "NEW DEBUGGEE 1 from user 2"),
        (Tag::Control, "Unable to read new connection type information"),
        (Tag::Server, "Connecting to control daemon on socket: /x"),
        (Tag::Server, "Initializing server process"),
        (Tag::Server, "MPS Server: worker created"),
        (Tag::Server, "Volta MPS: Creating worker thread"),
        (Tag::Server, "Creating worker thread for client {PID: 1, Context ID: 0}"),
        (Tag::Server, "Receive command failed, assuming client exit"),
        (Tag::Server, "Received new client request for {PID: 1073741824, Context ID: 1}"),
        (Tag::Server, "Client {PID: 1073741824, Context ID: 1} connected"),
        (Tag::Server, "Active Threads Percentage set to 33.0"),
        (Tag::Server, "activeThreadsPercentage set to 33.000000"),
        (Tag::Server, "Device pinned memory limit for device 0 set to 0x140000000 bytes"),
        (Tag::Server, "Server Priority set to 0"),
        (Tag::Server, "Created anonymous shared memory region mps.shm.1000.4428"),
        (Tag::Server, "Display Driver version: 580"),
        (Tag::Server, "Client termination succeeded."),
        (Tag::Server, "Server was unable to shutdown due to 2 active workers threads"),
        (Tag::Server, ""),
    ] {
        assert_eq!(says(tag, text), Message::Noise, "{text}");
    }
}

#[test]
fn nothing_is_guessed() {
    for text in [
        "Server 95 exited with status 1x",
        "Server 99999999999 exited with status 1",
        "Server  exited with status 1",
        "Client {12, 1} exits",
        "Client {12, 1",
        "Client 12 left",
        "NEW CLIENT 1 from user 2: Server does something new",
        "NEW CLIENT x from user 2: Server already exists",
        "NEW SERVER 12: Busy",
        "Status of client {1, 2} is WAITING",
        "Creating server context on device 0 soon",
        "Device of some sort",
        "10.0",
        "17 18",
        "\u{fffd}",
    ] {
        assert_eq!(says(Tag::Server, text), Message::Unknown, "{text}");
    }
}

#[test]
fn headings_and_numbers() {
    for text in ["The following devices will be reset:", "Volta MPS: The following devices"] {
        assert_eq!(says(Tag::Server, text), Message::Heading(Block::FaultDevices));
    }
    let sticky = "Volta MPS: The following clients have a sticky error set:";
    assert_eq!(says(Tag::Server, sticky), Message::Heading(Block::StickyClients));
    assert_eq!(says(Tag::Server, "11641"), Message::Number(11641));
}

#[test]
fn own_words_are_bounded_text() {
    let mut text = b"Failed to start : \xff".to_vec();
    text.resize(5000, b'x');
    let Some(L::ServerStartFailed(reason)) = message(Tag::LegacyServer, &text).into_owned() else { panic!() };
    assert!(reason.starts_with('\u{fffd}') && reason.len() <= WORDS_LIMIT + 2);
}
