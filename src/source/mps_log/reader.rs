//! From bytes to what they say: lines of any length, numbers under headings, answers to commands, counts.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::common::{self, Says};
use super::cri;
use super::envelope::{self, Envelope, Stamp, Tag};
use super::grammar::{self, Block, Interface, Message};
use crate::event::{LogEntry, LogFile, LogMessage};

/// Longer lines are skipped up to their end and counted as unrecognized. The longest known message has a path in it.
pub const LINE_LIMIT: usize = 16 * 1024;

/// How many writers may have a heading open at once; there is one server, rarely two.
const OPEN_BLOCKS_LIMIT: usize = 16;

/// Lines counted by class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Lines in the grammar, most of which change nothing.
    pub recognized: u64,
    /// Lines in no known grammar.
    pub unrecognized: u64,
}

/// What a reader must remember between lines. A cursor keeps it, so that a restart in the middle of a block loses
/// nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Context {
    /// Headings whose numbers may still come, by writer, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    blocks: Vec<(u32, Block)>,
    /// Whether the control daemon is answering a command.
    #[serde(default)]
    is_answering: bool,
    /// Whether the rest of a line that was too long is being skipped.
    #[serde(default)]
    is_skipping: bool,
    /// The beginning of a line that a container runtime cut, and the stream it came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    partial: Option<(cri::Stream, Vec<u8>)>,
}

impl Context {
    /// The context of a reader that begins in the middle of a line.
    pub(super) fn inside_a_line() -> Context {
        Context { is_skipping: true, ..Context::default() }
    }

    /// The context at the start of the file that follows: lines end with their file, blocks do not.
    pub(super) fn of_next_file(self) -> Context {
        Context { is_skipping: false, ..self }
    }
}

/// A line that matters.
#[derive(Debug, Clone, PartialEq)]
pub struct Said<'a> {
    /// When, by the line.
    pub stamp: Stamp<'a>,
    /// The pid in the tag.
    pub writer: u32,
    /// What it says.
    pub message: LogMessage,
    /// The line from its envelope's message on, for evidence.
    text: &'a [u8],
}

impl Said<'_> {
    /// The line as an event's content.
    pub fn into_entry(self, file: LogFile) -> LogEntry {
        let text = is_evidence(&self.message).then(|| grammar::words(self.text));
        LogEntry { file, writer: self.writer, message: self.message, text }
    }
}

/// Reads one stream of log lines.
#[derive(Debug, Clone)]
pub struct LineReader {
    file: LogFile,
    context: Context,
    counts: Counts,
}

impl LineReader {
    /// A reader of the lines of `file`. In a merged stream, lines may have the prefix of a container runtime.
    pub fn new(file: LogFile) -> LineReader {
        LineReader::resume(file, Context::default())
    }

    /// A reader that goes on where `context` was.
    pub fn resume(file: LogFile, context: Context) -> LineReader {
        LineReader { file, context, counts: Counts::default() }
    }

    /// What is read.
    pub fn file(&self) -> LogFile {
        self.file
    }

    /// What to remember.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The lines read since the last call.
    pub fn take_counts(&mut self) -> Counts {
        std::mem::take(&mut self.counts)
    }

    /// Reads the whole lines at the start of `chunk`, gives each that matters to `sink` with its offset in `chunk`,
    /// and returns how many bytes are done with. What is left is the beginning of a line; give it again with more.
    pub fn read(&mut self, chunk: &[u8], mut sink: impl FnMut(usize, Said<'_>)) -> usize {
        let mut start = 0;
        if self.context.is_skipping {
            match memchr::memchr(b'\n', chunk) {
                Some(end) => start = end + 1,
                None => return chunk.len(),
            }
            self.context.is_skipping = false;
        }
        loop {
            if self.context.blocks.is_empty() {
                start = self.common(chunk, start, &mut sink);
            }
            let Some(length) = memchr::memchr(b'\n', &chunk[start..]) else { break };
            let line = &chunk[start..start + length];
            self.whole_line(line, |said| sink(start, said));
            start += length + 1;
        }
        let rest = &chunk[start..];
        if rest.len() <= LINE_LIMIT {
            return start;
        }
        // A copytruncate under a writer that does not append leaves a hole of zeros before the next line.
        let zeros = zeros(rest);
        if zeros == rest.len() {
            return chunk.len();
        }
        if rest.len() - zeros <= LINE_LIMIT {
            return start + zeros;
        }
        self.counts.unrecognized += 1;
        self.context.is_skipping = true;
        chunk.len()
    }

    /// Reads the lines of common shapes from `start` on, and returns where the first other line begins.
    #[inline]
    fn common(&mut self, chunk: &[u8], mut start: usize, sink: &mut impl FnMut(usize, Said<'_>)) -> usize {
        while let Some(line) = common::line(&chunk[start..]) {
            self.counts.recognized += 1;
            let message = match line.says {
                Says::Noise => None,
                Says::Accepting => {
                    self.context.is_answering = false;
                    None
                }
                Says::Connected(pid) => Some(LogMessage::ClientConnected { pid }),
                Says::LeftUnnamed => Some(LogMessage::ClientLeftUnnamed { contexts_left: None }),
            };
            if let Some(message) = message {
                let text = &chunk[start + line.text..start + line.length - 1];
                sink(start, Said { stamp: line.stamp, writer: line.writer, message, text });
            }
            start += line.length;
        }
        start
    }

    /// Reads a line as it is in the file, which may be a part of one.
    fn whole_line(&mut self, line: &[u8], sink: impl FnMut(Said<'_>)) {
        // Too long is too long, prefix and all, also when the whole line arrives at once.
        let may_have_prefix = self.file == LogFile::Merged && line.len() <= LINE_LIMIT;
        let record = if may_have_prefix { cri::record(line) } else { None };
        let Some(record) = record else {
            return self.line(line).into_iter().for_each(sink);
        };
        match self.join(record) {
            Some(Cow::Borrowed(line)) => self.line(line).into_iter().for_each(sink),
            Some(Cow::Owned(line)) => self.line(&line).into_iter().for_each(sink),
            None => {}
        }
    }

    /// The line that a container runtime's record completes.
    fn join<'a>(&mut self, record: cri::Record<'a>) -> Option<Cow<'a, [u8]>> {
        let own = self.context.partial.take_if(|(stream, _)| *stream == record.stream);
        if own.is_none() && record.is_whole {
            return Some(Cow::Borrowed(record.text));
        }
        let mut line = own.map(|(_, line)| line).unwrap_or_default();
        // One byte over the limit is enough for the line to be refused when it is whole.
        let room = (LINE_LIMIT + 1).saturating_sub(line.len());
        line.extend_from_slice(&record.text[..record.text.len().min(room)]);
        if record.is_whole {
            return Some(Cow::Owned(line));
        }
        self.context.partial = Some((record.stream, line));
        None
    }

    /// Reads one line, without its newline.
    #[inline]
    pub fn line<'a>(&mut self, line: &'a [u8]) -> Option<Said<'a>> {
        let line = if line.first() == Some(&0) { &line[zeros(line)..] } else { line };
        if line.len() > LINE_LIMIT {
            return self.unknown();
        }
        match envelope::open(line) {
            Some(envelope) => self.opened(envelope),
            None if line.is_empty() || line == b"\r" => {
                self.counts.recognized += 1;
                None
            }
            None => self.unknown(),
        }
    }

    #[inline]
    fn opened<'a>(&mut self, envelope: Envelope<'a>) -> Option<Said<'a>> {
        let message = grammar::message(envelope.tag, envelope.text);
        if !self.context.blocks.is_empty() && !matches!(message, Message::Number(_)) {
            self.context.blocks.retain(|(writer, _)| *writer != envelope.writer);
        }
        let message = match message {
            Message::Noise => None,
            Message::Unknown => return self.unmatched(envelope),
            Message::Interface(step) => {
                self.context.is_answering = step == Interface::Command;
                None
            }
            Message::Heading(block) => {
                self.open_block(envelope.writer, block);
                None
            }
            Message::Number(number) => match self.block(envelope.writer) {
                Some(block) => Some(block.entry(number)),
                None => return self.unmatched(envelope),
            },
            message => message.into_owned(),
        };
        self.counts.recognized += 1;
        message.map(|message| Said {
            stamp: envelope.stamp,
            writer: envelope.writer,
            message,
            text: envelope.text,
        })
    }

    fn block(&self, writer: u32) -> Option<Block> {
        self.context.blocks.iter().find(|(pid, _)| *pid == writer).map(|(_, block)| *block)
    }

    fn open_block(&mut self, writer: u32, block: Block) {
        if self.context.blocks.len() == OPEN_BLOCKS_LIMIT {
            self.context.blocks.remove(0);
        }
        self.context.blocks.push((writer, block));
    }

    /// A message in no table: an answer of the daemon to a command, or a record that a crash cut short with the next
    /// one right behind it, or unknown.
    #[cold]
    fn unmatched<'a>(&mut self, envelope: Envelope<'a>) -> Option<Said<'a>> {
        // An answer may hold any text (a program's name, say): nothing is looked for inside it.
        if self.context.is_answering && envelope.tag == Tag::Control {
            self.counts.recognized += 1;
            return None;
        }
        match envelope::open_later(envelope.text).or_else(|| envelope::open(envelope.text)) {
            Some(inner) => self.opened(inner),
            None => self.unknown(),
        }
    }

    #[cold]
    fn unknown(&mut self) -> Option<Said<'static>> {
        self.counts.unrecognized += 1;
        None
    }
}

/// How many zero bytes `text` begins with.
fn zeros(text: &[u8]) -> usize {
    text.iter().take_while(|byte| **byte == 0).count()
}

/// Whether an incident may rest on the line.
fn is_evidence(message: &LogMessage) -> bool {
    matches!(
        message,
        LogMessage::ServerBroke
            | LogMessage::ServerExited { .. }
            | LogMessage::ServerLaunchFailed { .. }
            | LogMessage::ServerStartFailed(_)
            | LogMessage::ServerForcedToLeave { .. }
            | LogMessage::DaemonStopping
            | LogMessage::ServerLeaving
            | LogMessage::ContextInactive { .. }
            | LogMessage::ClientFault { .. }
            | LogMessage::ServerFault
            | LogMessage::FaultDevice { .. }
            | LogMessage::StickyClient { .. }
            | LogMessage::ContextDestroyed { .. }
            | LogMessage::ContextCreated { .. }
            | LogMessage::ClientTerminating { .. }
            | LogMessage::ClientTerminationFailed
            | LogMessage::Trouble(_)
    )
}

#[cfg(test)]
mod tests;
