//! What a control daemon answers, read without any I/O.
//!
//! The wire protocol has no end-of-answer packet, so a [`Conversation`] asks in an order in which every answer ends
//! where the next one visibly begins: the server list (bare numbers) before the default percentage (`100.0`), the
//! client list (bare numbers) and `ps` (a header and rows, or nothing) before a server's state (a word) or the end of
//! the session. A server is asked for its clients only after it has answered for its state in the same session, so a
//! hung server is left with a single question. (Seen in 535, 550 and 555; 535 says itself that it knows no state.)

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use crate::event::{ContextLook, Look, ServerLook, ServerStatus};
use crate::identity::DeviceName;

/// Servers that one session asks about. MPS v2 has one active server, and one or two that finish.
const MAX_SERVERS: usize = 64;
/// Lines of a whole session: 60 contexts on each of 16 GPUs are about 2,000.
const MAX_LINES: usize = 16_384;

/// How much a session asks. What is asked is what control.log grows by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Which servers there are and how they fare: ten lines in control.log.
    State,
    /// Their clients and contexts too: two lines more per client, and five per server.
    Full,
}

/// A command for the control daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Question {
    /// `get_server_list`: answered by the daemon itself.
    ServerList,
    /// `get_default_active_thread_percentage`: answered by the daemon itself, on exactly one line.
    DefaultPercentage,
    /// `get_server_status`: one line; 535 does not know the command.
    ServerStatus(u32),
    /// `get_client_list`.
    ClientList(u32),
    /// `get_server_status` again, where the client list ends.
    EndOfClients(u32),
    /// `ps -p`.
    Contexts(u32),
    /// Not a command: nothing more will be asked.
    End,
}

impl fmt::Display for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Question::ServerList => f.write_str("get_server_list"),
            Question::DefaultPercentage => f.write_str("get_default_active_thread_percentage"),
            Question::ServerStatus(pid) | Question::EndOfClients(pid) => write!(f, "get_server_status {pid}"),
            Question::ClientList(pid) => write!(f, "get_client_list {pid}"),
            Question::Contexts(pid) => write!(f, "ps -p {pid}"),
            Question::End => f.write_str("end of session"),
        }
    }
}

/// An answer that cannot be understood. What it told before is not used: a guess would be worse than nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// The daemon answered something else than it was asked.
    #[error("unexpected answer to `{question}`: {answer:?}")]
    Unexpected {
        /// What was asked.
        question: String,
        /// The line, shortened.
        answer: String,
    },
    /// More servers than any daemon has.
    #[error("more than {MAX_SERVERS} servers listed")]
    TooManyServers,
    /// More lines than any daemon answers.
    #[error("more than {MAX_LINES} lines answered")]
    TooLong,
    /// The session ended before the last answer.
    #[error("the session ended before `{0}` was answered")]
    Unanswered(String),
}

/// One session's questions and answers.
#[derive(Debug)]
pub struct Conversation {
    depth: Depth,
    asked: VecDeque<Question>,
    look: Look,
    /// Servers whose state is not asked yet.
    unasked: VecDeque<u32>,
    columns: Option<Columns>,
    lines: usize,
}

impl Conversation {
    /// A conversation, and the questions that open it.
    pub fn new(depth: Depth) -> (Conversation, Vec<Question>) {
        let opening = vec![Question::ServerList, Question::DefaultPercentage];
        let conversation = Conversation {
            depth,
            asked: opening.iter().copied().collect(),
            look: Look::default(),
            unasked: VecDeque::new(),
            columns: None,
            lines: 0,
        };
        (conversation, opening)
    }

    /// The question whose answer is awaited, for messages.
    pub fn awaited(&self) -> Question {
        self.asked.front().copied().unwrap_or(Question::End)
    }

    /// The servers listed so far.
    pub fn servers(&self) -> impl Iterator<Item = u32> {
        self.look.servers.iter().map(|server| server.pid)
    }

    /// Takes a line of answer; gives what to ask next.
    pub fn line(&mut self, line: &str) -> Result<Vec<Question>, AnswerError> {
        let line = line.trim_matches(|c: char| c.is_whitespace() || c == '\0');
        if line.is_empty() {
            return Ok(Vec::new());
        }
        self.lines += 1;
        if self.lines > MAX_LINES {
            return Err(AnswerError::TooLong);
        }
        let next = match self.asked.front().copied() {
            Some(Question::ServerList) => self.server_list(line)?,
            Some(Question::DefaultPercentage) => self.default_percentage(line)?,
            Some(Question::ServerStatus(pid)) => self.server_status(pid, line)?,
            Some(Question::ClientList(pid)) => self.client_list(pid, line)?,
            Some(Question::EndOfClients(pid)) => self.end_of_clients(pid, line)?,
            Some(Question::Contexts(pid)) => self.contexts(pid, line)?,
            Some(Question::End) | None => return Err(unexpected(Question::End, line)),
        };
        self.asked.extend(next.iter().copied());
        Ok(next)
    }

    /// What was learnt, once the daemon has confirmed the end of the session.
    pub fn finish(mut self) -> Result<Look, AnswerError> {
        if let Some(Question::Contexts(pid)) = self.asked.front().copied() {
            self.end_of_contexts(pid);
        }
        match self.asked.pop_front() {
            Some(Question::End) => Ok(self.look),
            Some(question) => Err(AnswerError::Unanswered(question.to_string())),
            None => Err(AnswerError::Unanswered(Question::End.to_string())),
        }
    }

    fn server_list(&mut self, line: &str) -> Result<Vec<Question>, AnswerError> {
        if let Some(pid) = bare_number(line) {
            if self.look.servers.len() == MAX_SERVERS {
                return Err(AnswerError::TooManyServers);
            }
            if self.look.servers.iter().all(|server| server.pid != pid) {
                self.look.servers.push(ServerLook { pid, status: None, clients: None, contexts: None });
                self.unasked.push_back(pid);
            }
            return Ok(Vec::new());
        }
        if unknown_command(line) == Some("get_server_list") {
            return Err(unexpected(Question::ServerList, line));
        }
        self.asked.pop_front();
        self.default_percentage(line)
    }

    fn default_percentage(&mut self, line: &str) -> Result<Vec<Question>, AnswerError> {
        let percentage = line.parse::<f64>().ok().filter(|value| value.is_finite());
        if percentage.is_none() && unknown_command(line) != Some("get_default_active_thread_percentage") {
            return Err(unexpected(Question::DefaultPercentage, line));
        }
        self.look.default_active_thread_percentage = percentage;
        self.asked.pop_front();
        Ok(vec![self.next_server()])
    }

    fn server_status(&mut self, pid: u32, line: &str) -> Result<Vec<Question>, AnswerError> {
        self.asked.pop_front();
        if is_not_served(line) {
            // It left between two questions: it is no server any more.
            self.look.servers.retain(|server| server.pid != pid);
            return Ok(vec![self.next_server()]);
        }
        let status = status(line).ok_or_else(|| unexpected(Question::ServerStatus(pid), line))?;
        let depth = self.depth;
        if let Some(server) = self.server(pid) {
            server.status = status;
            server.clients = (depth == Depth::Full).then(Vec::new);
        }
        Ok(match depth {
            Depth::State => vec![self.next_server()],
            Depth::Full => vec![Question::ClientList(pid), Question::EndOfClients(pid)],
        })
    }

    fn client_list(&mut self, pid: u32, line: &str) -> Result<Vec<Question>, AnswerError> {
        if let Some(client) = bare_number(line) {
            if let Some(clients) = self.server(pid).and_then(|server| server.clients.as_mut()) {
                clients.push(client);
            }
            return Ok(Vec::new());
        }
        self.asked.pop_front();
        if is_not_served(line) {
            self.leave_untold(pid);
            return Ok(Vec::new());
        }
        self.end_of_clients(pid, line)
    }

    fn end_of_clients(&mut self, pid: u32, line: &str) -> Result<Vec<Question>, AnswerError> {
        self.asked.pop_front();
        if is_not_served(line) {
            self.leave_untold(pid);
        } else {
            let status = status(line).ok_or_else(|| unexpected(Question::ClientList(pid), line))?;
            if let Some(server) = self.server(pid) {
                server.status = status;
            }
        }
        Ok(vec![Question::Contexts(pid), self.next_server()])
    }

    fn contexts(&mut self, pid: u32, line: &str) -> Result<Vec<Question>, AnswerError> {
        if let Some(columns) = Columns::of_header(line) {
            self.columns = Some(columns);
            if let Some(server) = self.server(pid) {
                server.contexts = Some(Vec::new());
            }
            return Ok(Vec::new());
        }
        let is_about_the_next = matches!(self.asked.get(1), Some(Question::ServerStatus(next))
            if *next != pid && line.starts_with(&format!("Server {next} ")));
        if is_not_served(line) && !is_about_the_next {
            self.leave_untold(pid);
            return Ok(Vec::new());
        }
        if line.as_bytes()[0].is_ascii_digit() {
            let context = self
                .columns
                .as_ref()
                .and_then(|columns| columns.row(line))
                .ok_or_else(|| unexpected(Question::Contexts(pid), line))?;
            if let Some(contexts) = self.server(pid).and_then(|server| server.contexts.as_mut()) {
                contexts.push(context);
            }
            return Ok(Vec::new());
        }
        // Anything else begins the next answer.
        self.end_of_contexts(pid);
        match self.asked.front().copied() {
            Some(Question::ServerStatus(next)) => self.server_status(next, line),
            _ => Err(unexpected(Question::Contexts(pid), line)),
        }
    }

    fn end_of_contexts(&mut self, pid: u32) {
        self.asked.pop_front();
        self.columns = None;
        // Of a server without clients `ps` prints nothing, not even its header.
        if let Some(server) = self.server(pid)
            && server.clients.as_ref().is_some_and(Vec::is_empty)
        {
            server.contexts.get_or_insert_default();
        }
    }

    /// A server that left while it was asked: nothing is known of its clients.
    fn leave_untold(&mut self, pid: u32) {
        if let Some(server) = self.server(pid) {
            server.clients = None;
            server.contexts = None;
        }
    }

    /// The question after which nothing of the current server can come.
    fn next_server(&mut self) -> Question {
        self.unasked.pop_front().map_or(Question::End, Question::ServerStatus)
    }

    fn server(&mut self, pid: u32) -> Option<&mut ServerLook> {
        self.look.servers.iter_mut().find(|server| server.pid == pid)
    }
}

/// Which column of `ps` is which. Found by the header: drivers from 550 on know forms with more columns.
#[derive(Debug, Clone)]
struct Columns {
    names: Vec<Column>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Column {
    Pid,
    Context,
    Device,
    Namespace,
    Command,
    Other,
}

impl Columns {
    fn of_header(line: &str) -> Option<Columns> {
        let names: Vec<Column> = line
            .split_ascii_whitespace()
            .map(|name| match name {
                "PID" => Column::Pid,
                "ID" => Column::Context,
                "DEVICE" => Column::Device,
                "NAMESPACE" => Column::Namespace,
                "COMMAND" => Column::Command,
                _ => Column::Other,
            })
            .collect();
        let has = |column| names.contains(&column);
        (has(Column::Pid) && has(Column::Context) && has(Column::Device)).then_some(Columns { names })
    }

    fn row(&self, line: &str) -> Option<ContextLook> {
        let (mut pid, mut context, mut device, mut namespace, mut command) = (None, None, None, None, None);
        let mut rest = line;
        for column in &self.names {
            rest = rest.trim_start();
            if *column == Column::Command {
                command = program_name(rest);
                break; // a command may hold blanks: nothing behind it can be told apart
            }
            let (field, behind) = rest.split_at(rest.find(char::is_whitespace).unwrap_or(rest.len()));
            rest = behind;
            match column {
                Column::Pid => pid = bare_number(field),
                Column::Context => context = bare_number(field),
                Column::Device => device = device_name(field),
                Column::Namespace => namespace = field.parse().ok(),
                Column::Command | Column::Other => {}
            }
        }
        Some(ContextLook { pid: pid?, context: context?, device: device?, namespace, command })
    }
}

/// The device of a `ps` row: the daemon cuts a UUID after its third group.
fn device_name(field: &str) -> Option<DeviceName> {
    let (kind, groups) = field.split_once('-')?;
    let is_hex = |group: &str| !group.is_empty() && group.bytes().all(|b| b.is_ascii_hexdigit());
    if !matches!(kind, "GPU" | "MIG") || !groups.split('-').all(is_hex) {
        return None;
    }
    let name: Arc<str> = format!("{kind}-{}", groups.to_ascii_lowercase()).into();
    Some(if groups.split('-').count() == 5 { DeviceName::Uuid(name) } else { DeviceName::UuidPrefix(name) })
}

/// The program's name without its directory and without anything that could be an argument.
///
/// The column is the client's `argv[0]`, which programs overwrite at will. With a slash behind a blank nobody can tell
/// a directory with a blank in its name from an argument: then it is not told.
fn program_name(command: &str) -> Option<Arc<str>> {
    let command = command.trim();
    let (program, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
    if rest.contains('/') {
        return None;
    }
    let name = program.rsplit('/').next().unwrap_or(program);
    (!name.is_empty()).then(|| name.into())
}

/// The state in an answer; `Some(None)` where it is one that we, or the driver, do not know.
#[allow(clippy::option_option)]
fn status(line: &str) -> Option<Option<ServerStatus>> {
    match line {
        "ACTIVE" => Some(Some(ServerStatus::Active)),
        "FAULT" => Some(Some(ServerStatus::Fault)),
        "INITIALIZING" => Some(Some(ServerStatus::Initializing)),
        _ if unknown_command(line) == Some("get_server_status") => Some(None),
        _ => line.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_').then_some(None),
    }
}

fn bare_number(field: &str) -> Option<u32> {
    let is_bare = !field.is_empty() && field.bytes().all(|b| b.is_ascii_digit());
    if is_bare { field.parse().ok() } else { None }
}

/// The command in `Unknown command "…"`.
fn unknown_command(line: &str) -> Option<&str> {
    line.strip_prefix("Unknown command \"")?.split('"').next()
}

/// `Server 999 not found`, `Server not found`, `Server 4711 is <busy>`: nothing is told of this server.
fn is_not_served(line: &str) -> bool {
    line.starts_with("Server ") && (line.contains("not found") || line.ends_with("is <busy>"))
}

fn unexpected(question: Question, line: &str) -> AnswerError {
    AnswerError::Unexpected { question: question.to_string(), answer: line.chars().take(120).collect() }
}

#[cfg(test)]
mod tests;
