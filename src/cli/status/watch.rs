//! The picture, in the same place, whenever it changes.

use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use anyhow::Context as _;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

use super::ask::News;
use super::screen::{Line, Style, text};
use super::{Eye, has_color, lines};
use crate::cli::text::{columns, print, rows};
use crate::http_client::Client;

/// How often it is drawn at most, however much happens.
const MIN_PAUSE: Duration = Duration::from_millis(200);
/// How often it is drawn at least: times since something happened go on.
const MAX_PAUSE: Duration = Duration::from_secs(10);
/// How often an exporter that gives no events is asked.
const POLL: Duration = Duration::from_secs(2);
/// To the other screen, without a cursor.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
/// Back, with one.
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// The terminal's other screen, for as long as this lives.
struct OtherScreen;

impl OtherScreen {
    fn enter() -> anyhow::Result<OtherScreen> {
        print(ENTER)?;
        Ok(OtherScreen)
    }
}

impl Drop for OtherScreen {
    fn drop(&mut self) {
        let mut out = std::io::stdout();
        let _nobody_looks = out.write_all(LEAVE.as_bytes()).and_then(|()| out.flush());
    }
}

/// Draws until a signal comes. An exporter that does not answer is told of in place: it may come back.
pub(super) async fn watch(eye: &Eye, note: Option<&str>, is_whole: bool) -> anyhow::Result<()> {
    let listen = |kind| signal(kind).context("cannot listen for signals");
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut terminate = listen(SignalKind::terminate())?;
    let resized = listen(SignalKind::window_change())?;
    tokio::select! {
        drawn = draw(eye, note, is_whole, resized) => drawn,
        _ = interrupt.recv() => Ok(()),
        _ = terminate.recv() => Ok(()),
    }
}

async fn draw(eye: &Eye, note: Option<&str>, is_whole: bool, mut resized: Signal) -> anyhow::Result<()> {
    let is_terminal = std::io::stdout().is_terminal();
    let _screen = is_terminal.then(OtherScreen::enter).transpose()?;
    let mut changes = Changes::of(eye).await;
    let mut shown = String::new();
    loop {
        let drawn_at = Instant::now();
        let width = columns().unwrap_or(usize::MAX);
        let picture = match eye.look().await {
            Ok(json) => lines(&json, note, width, is_whole),
            Err(error) => Err(error),
        };
        let picture = picture.unwrap_or_else(|error| vec![Line::new(Style::Bad, &format!("{error:#}"))]);
        let picture = if is_terminal {
            frame(&picture, width, rows().unwrap_or(usize::MAX))
        } else {
            text(&picture, width, false) + "\n"
        };
        if picture != shown {
            print(&picture)?;
            shown = picture;
        }
        tokio::select! {
            () = changes.next() => {}
            () = sleep(MAX_PAUSE) => {}
            // The terminal may have moved what was drawn.
            _ = resized.recv() => shown.clear(),
        }
        sleep_until(drawn_at + MIN_PAUSE).await;
    }
}

/// What tells that the picture may be another.
enum Changes<'e> {
    /// The own look.
    Own(watch::Receiver<u64>),
    /// An exporter's events.
    Events(&'e Client, News),
    /// Nothing: the exporter gives no events now, and is asked again and again.
    Poll(&'e Client),
}

impl Changes<'_> {
    async fn of(eye: &Eye) -> Changes<'_> {
        match eye {
            Eye::Own(look) => Changes::Own(look.generations()),
            Eye::Exporter(exporter) => Changes::of_exporter(exporter).await,
        }
    }

    async fn of_exporter(exporter: &Client) -> Changes<'_> {
        News::listen(exporter)
            .await
            .map_or_else(|_| Changes::Poll(exporter), |news| Changes::Events(exporter, news))
    }

    /// Waits until the picture may be another.
    async fn next(&mut self) {
        match self {
            Changes::Own(generations) => {
                if generations.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
            Changes::Events(exporter, news) => {
                if !news.next().await {
                    *self = Changes::Poll(exporter);
                }
            }
            Changes::Poll(exporter) => {
                sleep(POLL).await;
                *self = Changes::of_exporter(exporter).await;
            }
        }
    }
}

/// The picture over the one before it, without flicker: each line ends with "erase the rest".
fn frame(picture: &[Line], width: usize, height: usize) -> String {
    let mut out = String::from("\x1b[H");
    let shown = if picture.len() > height { height.saturating_sub(1) } else { picture.len() };
    let mut drawn: Vec<String> =
        picture.iter().take(shown).map(|line| line.render(width, has_color())).collect();
    if shown < picture.len() {
        drawn.push(format!("… {} more lines", picture.len() - shown));
    }
    // No line feed after the last line: it would scroll.
    out.push_str(&drawn.join("\x1b[K\r\n"));
    out.push_str("\x1b[K\x1b[J");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_fits_the_terminal() {
        let picture: Vec<Line> = (0..5).map(|number| Line::default().plain(&number.to_string())).collect();
        assert_eq!(frame(&picture, 80, 3), "\x1b[H0\x1b[K\r\n1\x1b[K\r\n… 3 more lines\x1b[K\x1b[J");
        assert_eq!(frame(&picture[..2], 80, 3), "\x1b[H0\x1b[K\r\n1\x1b[K\x1b[J");
    }
}
