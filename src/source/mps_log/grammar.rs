//! The messages of control.log and server.log, in every wording from driver 460 to 580.
//!
//! Old servers put `Volta MPS: `, `Volta MPS Server: ` or `MPS Server: ` before their messages and wrote some of them
//! in lower case. From 535 on there is no prefix. What is known and changes nothing is [`Message::Noise`]; what is
//! in no table is [`Message::Unknown`] and is counted, never guessed at.

use std::sync::Arc;

use super::envelope::Tag;
use crate::event::{LogMessage, Rejection, Trouble};
use crate::identity::DeviceName;

/// The pid that a 580 server prints before it knows a client's own (0x40000000). It is nobody's.
pub(super) const PLACEHOLDER_PID: u32 = 1 << 30;

/// How much of a line's own words is kept.
const WORDS_LIMIT: usize = 512;

/// What a message says, borrowed from the line.
#[derive(Debug, Clone, PartialEq)]
pub enum Message<'a> {
    /// In no table.
    Unknown,
    /// Known; changes nothing.
    Noise,
    /// A user interface session begins, continues or ends: what the daemon answers to its commands follows.
    Interface(Interface),
    /// The heading of a block of bare numbers.
    Heading(Block),
    /// A bare number. What it means, the heading above it says.
    Number(u32),
    /// Something that matters, in numbers alone.
    Tells(LogMessage),
    /// [`LogMessage::ServerStartFailed`], with the reason in the server's words.
    StartFailed(&'a [u8]),
    /// [`LogMessage::ContextCreated`].
    ContextCreated {
        /// Ordinal in the server's enumeration.
        device: u32,
        /// Device name, where logged.
        name: Option<&'a [u8]>,
    },
    /// [`LogMessage::DeviceAssociated`], by UUID.
    DeviceAssociated(&'a str),
}

/// The course of a user interface session in control.log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interface {
    /// `Cmd:…`: lines of its answer follow.
    Command,
    /// `NEW UI`, `UI closed`, `Accepting connection...`: no answer is under way.
    Quiet,
}

/// What the bare numbers under a heading are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Block {
    /// Device ordinals of a fault.
    FaultDevices,
    /// Pids of the victims.
    StickyClients,
}

impl Block {
    /// What a number in the block says.
    pub fn entry(self, number: u32) -> LogMessage {
        match self {
            Block::FaultDevices => LogMessage::FaultDevice { ordinal: number },
            Block::StickyClients => LogMessage::StickyClient { pid: number },
        }
    }
}

impl Message<'_> {
    /// The message in the model's words; `None` when it changes nothing by itself.
    pub fn into_owned(self) -> Option<LogMessage> {
        match self {
            Message::Tells(message) => Some(message),
            Message::StartFailed(reason) => Some(LogMessage::ServerStartFailed(words(reason))),
            Message::ContextCreated { device, name } => {
                Some(LogMessage::ContextCreated { device, name: name.map(words) })
            }
            Message::DeviceAssociated(uuid) => {
                Some(LogMessage::DeviceAssociated { device: device_name(uuid) })
            }
            Message::Unknown
            | Message::Noise
            | Message::Interface(_)
            | Message::Heading(_)
            | Message::Number(_) => None,
        }
    }
}

/// A line's own words, made text and cut to a bounded length.
pub(super) fn words(text: &[u8]) -> Arc<str> {
    String::from_utf8_lossy(&text[..text.len().min(WORDS_LIMIT)]).into()
}

/// What `text` says when `tag` says it.
#[inline]
pub fn message(tag: Tag, text: &[u8]) -> Message<'_> {
    // The first letter chooses, without its case; `says` then compares the rest.
    let text = match text.first() {
        Some(b'V' | b'M') => without_old_prefix(text),
        _ => text,
    };
    let Some(first) = text.first() else { return Message::Noise };
    match first | 0x20 {
        b'c' => c(text),
        b'r' => r(text),
        b'a' => a(text),
        b'n' => n(text),
        b's' => s(tag, text),
        b'd' => d(text),
        b'w' => w(text),
        b'u' => u(tag, text),
        b'f' => f(text),
        b't' => t(text),
        b'e' => e(text),
        b'i' => i(text),
        b'm' => m(text),
        b'p' if says(text, "Pre-Volta device").is_some() => trouble(Trouble::DeviceNotServed),
        b'q' if says(text, "quit command issued with timeout of").is_some() => {
            Message::Tells(LogMessage::DaemonStopping)
        }
        b'0'..=b'9' => whole_number(text).map_or(Message::Unknown, Message::Number),
        _ => Message::Unknown,
    }
}

fn without_old_prefix(text: &[u8]) -> &[u8] {
    ["Volta MPS Server: ", "Volta MPS: ", "MPS Server: "]
        .iter()
        .find_map(|prefix| text.strip_prefix(prefix.as_bytes()))
        .unwrap_or(text)
}

/// What follows `wording` at the start of `text`. The first letter was compared already, whatever its case.
#[inline(always)]
#[expect(clippy::inline_always, reason = "constant wordings then compile to a few word comparisons")]
fn says<'a>(text: &'a [u8], wording: &'static str) -> Option<&'a [u8]> {
    text.get(1..)?.strip_prefix(&wording.as_bytes()[1..])
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "as for `says`")]
fn is(text: &[u8], wording: &'static str) -> bool {
    text.get(1..) == Some(&wording.as_bytes()[1..])
}

fn trouble(trouble: Trouble) -> Message<'static> {
    Message::Tells(LogMessage::Trouble(trouble))
}

fn rejected(reason: Rejection) -> Message<'static> {
    Message::Tells(LogMessage::ClientRejected(reason))
}

/// Noise, if any of these wordings begins the text.
fn noise_if(text: &[u8], wordings: &[&'static str]) -> Message<'static> {
    if wordings.iter().any(|wording| says(text, wording).is_some()) {
        Message::Noise
    } else {
        Message::Unknown
    }
}

#[inline]
fn a(text: &[u8]) -> Message<'_> {
    if is(text, "Accepting connection...") {
        return Message::Interface(Interface::Quiet);
    }
    if says(text, "An instance of this daemon is already running").is_some() {
        return trouble(Trouble::AlreadyRunning);
    }
    // `activeThreadsPercentage` up to 460.
    noise_if(text, &["Active Threads Percentage set to ", "activeThreadsPercentage set to "])
}

#[inline]
fn c(text: &[u8]) -> Message<'_> {
    if let Some(rest) = says(text, "Client ") {
        return client(rest).unwrap_or(Message::Unknown);
    }
    if says(text, "Creating worker thread").is_some() {
        return Message::Noise;
    }
    if says(text, "Cmd:").is_some() {
        return Message::Interface(Interface::Command);
    }
    if let Some(rest) = says(text, "Creating server context on device ") {
        return context_created(rest).unwrap_or(Message::Unknown);
    }
    if says(text, "Cannot access CUDA_MPS_PIPE_DIRECTORY").is_some() {
        return trouble(Trouble::PipeDirectory);
    }
    if let Some(version) = says(text, "CUDA MPS Control binary version: ") {
        return tells(whole_number(version).map(LogMessage::DaemonVersion));
    }
    if let Some(version) = says(text, "CUDA MPS Server for Linux/Unix. Binary version: ") {
        return tells(whole_number(version).map(LogMessage::ServerVersion));
    }
    noise_if(
        text,
        &[
            "Connecting to control daemon on socket:",
            "Created anonymous shared memory region",
            "Control will try shutting down server ",
        ],
    )
}

/// `Client …`: comings and goings. `rest` is what follows the blank.
#[inline]
fn client(rest: &[u8]) -> Option<Message<'_>> {
    if rest.first() == Some(&b'{') {
        let (pid, context, after) = pid_and_context(rest)?;
        return Some(match after {
            b" connected" | b" exit" | b" disconnected" if pid == PLACEHOLDER_PID => Message::Noise,
            b" connected" => Message::Tells(LogMessage::ClientConnected { pid }),
            b" exit" | b" disconnected" => {
                Message::Tells(LogMessage::ClientLeft { pid, context: Some(context) })
            }
            _ => return None,
        });
    }
    if rest == b"process disconnected" {
        return Some(Message::Tells(LogMessage::ClientLeftUnnamed { contexts_left: None }));
    }
    if let Some(rest) = rest.strip_prefix(b"process ") {
        let (pid, after) = number(rest)?;
        return after
            .starts_with(b" encountered a fatal GPU error")
            .then_some(Message::Tells(LogMessage::ClientFault { pid }));
    }
    if let Some(rest) = rest.strip_prefix(b"disconnected") {
        let at = memchr::memmem::find(rest, b"Number of active client contexts is ");
        let left = at.and_then(|at| number(&rest[at + "Number of active client contexts is ".len()..]));
        let contexts_left = left.map(|(contexts, _)| contexts);
        return Some(Message::Tells(LogMessage::ClientLeftUnnamed { contexts_left }));
    }
    if let Some(rest) = rest.strip_prefix(b"termination ") {
        return if rest.starts_with(b"failed") {
            Some(Message::Tells(LogMessage::ClientTerminationFailed))
        } else {
            rest.starts_with(b"succeeded").then_some(Message::Noise)
        };
    }
    let (pid, after) = number(rest)?;
    (after == b" disconnected").then_some(Message::Tells(LogMessage::ClientLeft { pid, context: None }))
}

/// `N (name)`, where the name is newer than the number.
fn context_created(rest: &[u8]) -> Option<Message<'_>> {
    let (device, after) = number(rest)?;
    let name = after.strip_prefix(b" (").and_then(|name| name.strip_suffix(b")"));
    (after.is_empty() || name.is_some()).then_some(Message::ContextCreated { device, name })
}

fn d(text: &[u8]) -> Message<'_> {
    if let Some(rest) = says(text, "Destroy server context on device ") {
        return tells(whole_number(rest).map(|device| LogMessage::ContextDestroyed { device }));
    }
    if let Some(rest) = says(text, "Device ") {
        return device(rest);
    }
    if let Some(reason) = says(text, "Driver initialization failed with:") {
        return Message::StartFailed(reason.trim_ascii_start());
    }
    noise_if(text, &["Display Driver version: "])
}

fn device(rest: &[u8]) -> Message<'_> {
    if let Some(rest) = rest.strip_suffix(b" is associated") {
        // `NAME (uuid GPU-…)`. The older form, four bare 32-bit words, does not tell their byte order.
        let uuid = memchr::memmem::rfind(rest, b"(uuid ").map(|at| &rest[at + 6..]);
        let uuid =
            uuid.and_then(|uuid| uuid.strip_suffix(b")")).and_then(|uuid| std::str::from_utf8(uuid).ok());
        return match uuid {
            Some(uuid) if uuid.starts_with("GPU-") || uuid.starts_with("MIG-") => {
                Message::DeviceAssociated(uuid)
            }
            Some(_) => Message::Noise,
            None => Message::Unknown,
        };
    }
    if rest.starts_with(b"pinned memory limit ") {
        return Message::Noise;
    }
    let is_refused = rest.ends_with(b"is not supported by this MPS server.")
        || rest.ends_with(b"is not supported by this MPS server")
        || rest.ends_with(b"is invisible to this MPS server.")
        || rest.ends_with(b"is invisible to this MPS server");
    if is_refused { trouble(Trouble::DeviceNotServed) } else { Message::Unknown }
}

/// The name of a device by the UUID that a log printed, whole or cut.
fn device_name(uuid: &str) -> DeviceName {
    let (prefix, hex) = uuid.split_at(4.min(uuid.len()));
    let uuid: Arc<str> = format!("{prefix}{}", hex.to_ascii_lowercase()).into();
    // A whole UUID has four dashes after the prefix's own.
    if uuid.bytes().filter(|byte| *byte == b'-').count() >= 5 {
        DeviceName::Uuid(uuid)
    } else {
        DeviceName::UuidPrefix(uuid)
    }
}

fn e(text: &[u8]) -> Message<'_> {
    if is(text, "Exiting") {
        return Message::Tells(LogMessage::ServerLeaving);
    }
    // Also written by a second daemon that was refused its start, so it says nothing about this one.
    noise_if(text, &["Exit with status "])
}

fn f(text: &[u8]) -> Message<'_> {
    if let Some(rest) = says(text, "Failed to start server using uid ") {
        return tells(number(rest).map(|(uid, _)| LogMessage::ServerLaunchFailed { uid }));
    }
    if says(text, "Failed to accept new client").is_some() {
        return if memchr::memmem::find(text, b"device connections").is_some() {
            rejected(Rejection::DeviceConnectionLimit)
        } else if memchr::memmem::find(text, b"Maximum number of clients").is_some() {
            rejected(Rejection::ClientLimit)
        } else {
            Message::Unknown
        };
    }
    if let Some(rest) = says(text, "Forcefully terminating client ") {
        let pid = number(rest).or_else(|| pid_and_context(rest).map(|(pid, _, after)| (pid, after)));
        return tells(pid.map(|(pid, _)| LogMessage::ClientTerminating { pid }));
    }
    if let Some(rest) = says(text, "Force shutting down server ") {
        return tells(whole_number(rest).map(|pid| LogMessage::ServerForcedToLeave { pid }));
    }
    if says(text, "Failed to terminate client ").is_some() {
        return Message::Tells(LogMessage::ClientTerminationFailed);
    }
    if says(text, "Failed to create/open SHM segment").is_some()
        || says(text, "Failed to allocate shared memory region").is_some()
    {
        return trouble(Trouble::SharedMemory);
    }
    if says(text, "Failed to send credentials to server").is_some() {
        return rejected(Rejection::Credentials);
    }
    if let Some(reason) = says(text, "Failed to start :") {
        return Message::StartFailed(reason.trim_ascii_start());
    }
    if says(text, "Failed to connect to control daemon on socket:").is_some() {
        return Message::StartFailed(text);
    }
    noise_if(text, &["Failed to create control pid file"])
}

fn i(text: &[u8]) -> Message<'_> {
    if says(text, "Insufficient privileges for UID ").is_some() {
        return trouble(Trouble::Privileges);
    }
    noise_if(text, &["Initializing server process"])
}

/// What is left of `MPS Server …` after the prefix with a colon was taken off.
fn m(text: &[u8]) -> Message<'_> {
    if is(text, "MPS Server is started") {
        return Message::Tells(LogMessage::ServerStarted);
    }
    // The first line of a server up to 510.
    if says(text, "MPS Server connecting to control daemon on socket").is_some() {
        return Message::Tells(LogMessage::ServerStartup);
    }
    if says(text, "MPS Server failed to create/open SHM segment").is_some() {
        return trouble(Trouble::SharedMemory);
    }
    if says(text, "MPS is only supported on ").is_some() {
        return Message::StartFailed(text);
    }
    Message::Unknown
}

#[inline]
fn n(text: &[u8]) -> Message<'_> {
    if let Some(rest) = says(text, "NEW CLIENT ") {
        return new_client(rest).unwrap_or(Message::Unknown);
    }
    if is(text, "NEW UI") {
        return Message::Interface(Interface::Quiet);
    }
    if let Some(rest) = says(text, "NEW SERVER ") {
        return match number(rest) {
            Some((pid, b": Ready")) => Message::Tells(LogMessage::ServerReady { pid }),
            Some((_, after)) if after.starts_with(b": Ignoring ") => Message::Noise,
            _ => Message::Unknown,
        };
    }
    if let Some(rest) = says(text, "New client ") {
        return match number(rest) {
            Some((PLACEHOLDER_PID, _)) => Message::Noise,
            Some((pid, b" connected")) => Message::Tells(LogMessage::ClientConnected { pid }),
            _ => Message::Unknown,
        };
    }
    noise_if(text, &["NEW DEBUGGEE "])
}

fn new_client(rest: &[u8]) -> Option<Message<'_>> {
    let (pid, rest) = number(rest)?;
    let (uid, after) = number(rest.strip_prefix(b" from user ")?)?;
    match after {
        // 580 may say no more than this.
        b"" | b": Server already exists" => Some(Message::Tells(LogMessage::ClientAdmitted { pid, uid })),
        _ if after.starts_with(b": Server is not ready") => {
            Some(Message::Tells(LogMessage::ClientQueued { pid, uid }))
        }
        _ => None,
    }
}

#[inline]
fn r(text: &[u8]) -> Message<'_> {
    // Each is followed by a line that says who left, or that somebody did.
    if is(text, "Receive command failed, assuming client exit") {
        return Message::Noise;
    }
    if let Some(rest) = says(text, "Received new client request") {
        return match rest.strip_prefix(b" for ").map(pid_and_context) {
            Some(Some((PLACEHOLDER_PID, ..))) => Message::Noise,
            Some(Some((pid, ..))) => Message::Tells(LogMessage::ClientConnected { pid }),
            Some(None) => Message::Unknown,
            None => Message::Tells(LogMessage::ClientArriving),
        };
    }
    noise_if(text, &["Removed Shm file at"])
}

fn s(tag: Tag, text: &[u8]) -> Message<'_> {
    if let Some(rest) = says(text, "Status of client ") {
        return tells(pid_and_context(rest).and_then(|(pid, context, after)| match after {
            b" is ACTIVE" => Some(LogMessage::ContextActive { pid, context }),
            b" is INACTIVE" => Some(LogMessage::ContextInactive { pid, context }),
            _ => None,
        }));
    }
    if let Some(rest) = says(text, "Starting new server ") {
        return tells(number(rest).and_then(|(pid, rest)| {
            let uid = whole_number(rest.strip_prefix(b" for user ")?)?;
            Some(LogMessage::ServerStarting { pid, uid })
        }));
    }
    if says(text, "Server is handling a fatal GPU error").is_some() {
        return Message::Tells(LogMessage::ServerFault);
    }
    if says(text, "Server encountered a fatal exception").is_some() {
        return Message::Tells(LogMessage::ServerBroke);
    }
    if is(text, "Server has started") {
        return Message::Tells(LogMessage::ServerStarted);
    }
    if says(text, "Server has been notified to shutdown").is_some() {
        return Message::Tells(LogMessage::ServerLeaving);
    }
    if says(text, "Starting control daemon using socket").is_some() {
        return Message::Tells(LogMessage::DaemonStarted);
    }
    // `Start` is the first line of either program up to 460.
    if is(text, "Startup") || is(text, "Start") {
        return Message::Tells(if tag == Tag::Control {
            LogMessage::DaemonStarted
        } else {
            LogMessage::ServerStartup
        });
    }
    if says(text, "Server Priority set to ").is_some()
        || says(text, "Server was unable to shutdown").is_some()
    {
        return Message::Noise;
    }
    let Some((pid, rest)) = says(text, "Server ").and_then(number) else { return Message::Unknown };
    if let Some(status) = rest.strip_prefix(b" exited with status ") {
        return tells(signed(status).map(|status| LogMessage::ServerExited { pid, status }));
    }
    let is_busy = rest.starts_with(b" has ") && rest.ends_with(b"Server will not shutdown.");
    if is_busy { Message::Noise } else { Message::Unknown }
}

fn t(text: &[u8]) -> Message<'_> {
    // Up to 510 the first heading ends after `devices`.
    if says(text, "The following devices").is_some() {
        return Message::Heading(Block::FaultDevices);
    }
    if says(text, "The following clients have a sticky error set").is_some() {
        return Message::Heading(Block::StickyClients);
    }
    if let Some(rest) = says(text, "Try shutting down server ") {
        return tells(number(rest).map(|(pid, _)| LogMessage::ServerAskedToLeave { pid }));
    }
    if says(text, "The MPS control daemon is shutting down").is_some() {
        return Message::Tells(LogMessage::DaemonStopping);
    }
    if says(text, "Teardown in progress, client creation denied").is_some() {
        return rejected(Rejection::Teardown);
    }
    noise_if(text, &["To connect CUDA applications to this daemon, set env "])
}

fn u(tag: Tag, text: &[u8]) -> Message<'_> {
    if is(text, "UI closed") {
        return Message::Interface(Interface::Quiet);
    }
    if says(text, "User did not send valid credentials").is_some() {
        // In control.log it precedes nearly every healthy client.
        return if tag == Tag::Control { Message::Noise } else { rejected(Rejection::Credentials) };
    }
    noise_if(
        text,
        &[
            "Unknown type of connection",
            "Unable to accept connection",
            "Unable to accept priviliged connection from other user",
            "Unable to read new connection type information",
            "Using log directory:",
        ],
    )
}

fn w(text: &[u8]) -> Message<'_> {
    if says(text, "Worker created").is_some() {
        return Message::Noise;
    }
    if says(text, "Worker is in reset").is_some() {
        return rejected(Rejection::InReset);
    }
    if says(text, "Waiting for current clients to finish").is_some() {
        return Message::Tells(LogMessage::ServerLeaving);
    }
    if says(text, "Warning: File descriptor limit ").is_some() {
        return trouble(Trouble::FileDescriptorLimit);
    }
    if says(text, "Warning: Failed writing log files ").is_some() {
        return trouble(Trouble::LogsUnwritable);
    }
    Message::Unknown
}

fn tells(message: Option<LogMessage>) -> Message<'static> {
    message.map_or(Message::Unknown, Message::Tells)
}

/// The number at the start of `text`, and the rest.
#[inline]
pub(super) fn number(text: &[u8]) -> Option<(u32, &[u8])> {
    let mut value = 0_u32;
    let mut at = 0;
    while let Some(digit) = text.get(at).map(|byte| u32::from(byte.wrapping_sub(b'0'))).filter(|d| *d <= 9) {
        value = value.checked_mul(10)?.checked_add(digit)?;
        at += 1;
    }
    (at > 0).then(|| (value, &text[at..]))
}

fn whole_number(text: &[u8]) -> Option<u32> {
    number(text).and_then(|(value, rest)| rest.is_empty().then_some(value))
}

fn signed(text: &[u8]) -> Option<i32> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// `{4267, 1}`, or since 580 `{PID: 4267, Context ID: 1}`; and the rest.
#[inline]
fn pid_and_context(text: &[u8]) -> Option<(u32, u32, &[u8])> {
    let text = text.strip_prefix(b"{")?;
    let text = text.strip_prefix(b"PID: ").unwrap_or(text);
    let (pid, rest) = number(text)?;
    let rest = rest.strip_prefix(b", ")?;
    let rest = rest.strip_prefix(b"Context ID: ").unwrap_or(rest);
    let (context, rest) = number(rest)?;
    Some((pid, context, rest.strip_prefix(b"}")?))
}

#[cfg(test)]
mod tests;
