//! Logs of the exporter itself, on standard error: logfmt, or JSON.

use std::fmt::{self, Write as _};

use clap::ValueEnum;
use jiff::Timestamp;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;

/// What is logged, by the names of Prometheus's exporter-toolkit. Every command has these flags: the ids are the names, so
/// that none clashes with a command's own `format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::Args)]
pub struct LogOptions {
    /// Log only messages of this severity or above.
    #[arg(id = "log.level", long, value_name = "LEVEL", default_value = "info", global = true)]
    pub level: LogLevel,

    /// How a message is written.
    #[arg(id = "log.format", long, value_name = "FORMAT", default_value = "logfmt", global = true)]
    pub format: LogFormat,
}

/// `--log.level`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Everything.
    Debug,
    /// Starts, stops, reloads, and what the exporter finds.
    Info,
    /// Unexpected, but nothing is lost.
    Warn,
    /// Data is lost, or somebody has to act.
    Error,
}

/// `--log.format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// `time=… level=… msg="…" key=value`.
    Logfmt,
    /// One JSON object a line.
    Json,
}

/// Starts logging. Later calls change nothing.
pub fn start(options: LogOptions) {
    let level = match options.level {
        LogLevel::Debug => Level::DEBUG,
        LogLevel::Info => Level::INFO,
        LogLevel::Warn => Level::WARN,
        LogLevel::Error => Level::ERROR,
    };
    // Libraries are heard when something is wrong.
    let filter = Targets::new().with_default(Level::WARN.min(level)).with_target("mps_exporter", level);
    let registry = tracing_subscriber::registry().with(filter);
    let writer = std::io::stderr;
    let _already_started = match options.format {
        LogFormat::Logfmt => registry
            .with(tracing_subscriber::fmt::layer().with_writer(writer).event_format(Logfmt))
            .try_init(),
        LogFormat::Json => {
            registry.with(tracing_subscriber::fmt::layer().with_writer(writer).event_format(Json)).try_init()
        }
    };
}

/// Fields of a message in the order in which they were given.
#[derive(Default)]
struct Fields {
    message: String,
    others: Vec<(&'static str, serde_json::Value)>,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        if field.name() == "message" {
            self.message = text;
        } else {
            self.others.push((field.name(), text.into()));
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            value.clone_into(&mut self.message);
        } else {
            self.others.push((field.name(), value.into()));
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.others.push((field.name(), value.into()));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.others.push((field.name(), value.into()));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.others.push((field.name(), value.into()));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.others.push((field.name(), value.into()));
    }
}

fn fields(event: &Event<'_>) -> Fields {
    let mut fields = Fields::default();
    event.record(&mut fields);
    fields
}

fn stamp() -> String {
    format!("{:.3}", Timestamp::now())
}

fn level(level: Level) -> &'static str {
    match level {
        Level::ERROR => "error",
        Level::WARN => "warn",
        Level::INFO => "info",
        Level::DEBUG => "debug",
        Level::TRACE => "trace",
    }
}

struct Logfmt;

impl<S, N> FormatEvent<S, N> for Logfmt
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let fields = fields(event);
        let mut line = format!("time={} level={}", stamp(), level(*event.metadata().level()));
        pair(&mut line, "source", event.metadata().target())?;
        pair(&mut line, "msg", &fields.message)?;
        for (key, value) in &fields.others {
            match value {
                serde_json::Value::String(text) => pair(&mut line, key, text)?,
                other => write!(line, " {key}={other}")?,
            }
        }
        writeln!(out, "{line}")
    }
}

/// A key and its value, quoted where a reader of logfmt needs it.
fn pair(line: &mut String, key: &str, value: &str) -> fmt::Result {
    let is_plain = !value.is_empty()
        && value.chars().all(|c| {
            c.is_ascii_graphic() && !matches!(c, '"' | '=' | '\\') || (!c.is_ascii() && !c.is_control())
        });
    if is_plain {
        write!(line, " {key}={value}")
    } else {
        // JSON's escapes are those of logfmt.
        write!(line, " {key}={}", serde_json::Value::from(value))
    }
}

struct Json;

impl<S, N> FormatEvent<S, N> for Json
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let fields = fields(event);
        let mut object = serde_json::Map::new();
        object.insert("time".into(), stamp().into());
        object.insert("level".into(), level(*event.metadata().level()).into());
        object.insert("source".into(), event.metadata().target().into());
        object.insert("msg".into(), fields.message.into());
        object.extend(fields.others.into_iter().map(|(key, value)| (key.to_owned(), value)));
        writeln!(out, "{}", serde_json::Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_quoted_only_where_it_must_be() {
        let mut line = String::new();
        for (key, value) in
            [("a", "plain"), ("b", "two words"), ("c", ""), ("d", "x=\"1\"\n"), ("e", "/tmp/é")]
        {
            pair(&mut line, key, value).unwrap();
        }
        assert_eq!(line, r#" a=plain b="two words" c="" d="x=\"1\"\n" e=/tmp/é"#);
    }
}
