//! The page at `/` for people: who dies with whom, now.
//!
//! It is drawn here from the snapshot, once for the whole page and once for the part that changes ([`state`]), which the
//! page's script puts in place when an event says that something changed. So browser and server cannot disagree, and
//! without the script the page still says everything.

mod fates;
mod html;
mod map;
mod record;
mod verdict;
mod words;

use jiff::Timestamp;

use crate::engine::snapshot::Snapshot;
use html::Html;
use verdict::Verdict;

/// The page's style sheet.
pub const STYLE: &str = include_str!("style.css");

/// The page's script.
pub const SCRIPT: &str = include_str!("app.js");

/// The whole page, given the path of the metrics.
pub fn index(snapshot: &Snapshot, now: Timestamp, telemetry_path: &str) -> String {
    let mut html = Html::default();
    html.raw("<!DOCTYPE html><html lang=en><head><meta charset=utf-8>");
    html.raw("<meta name=viewport content=\"width=device-width, initial-scale=1\"><title>");
    html.raw(Verdict::of(snapshot).word).raw(" \u{b7} mps-exporter</title>");
    html.raw("<meta name=color-scheme content=\"light dark\"><link rel=icon href=\"page/icon.svg\">");
    html.raw("<link rel=stylesheet href=\"page/style.css\"><script src=\"page/app.js\" defer></script></head><body>");
    html.raw("<a class=skip href=\"#state\">Skip to the state</a><header class=top><h1>mps-exporter</h1>");
    html.raw("<p id=live>as of ")
        .text(now.strftime("%H:%M:%S"))
        .raw(" UTC \u{b7} <a href=\"\">reload</a></p></header>");
    draw(&mut html, snapshot, now);
    html.raw("<footer><nav aria-label=\"Other views\"><a href=\"./")
        .text(telemetry_path.trim_start_matches('/'));
    html.raw("\">Metrics</a> <a href=\"api/v1/fault-domains\">Fault domains</a> ");
    html.raw("<a href=\"api/v1/incidents\">Incidents</a> <a href=\"api/v1/status\">Status</a> ");
    html.raw("<a href=\"-/ready\">Ready</a></nav><p>mps-exporter ").raw(env!("CARGO_PKG_VERSION"));
    html.raw("</p></footer></body></html>");
    html.finish()
}

/// The part of the page that changes.
pub fn state(snapshot: &Snapshot, now: Timestamp) -> String {
    let mut html = Html::default();
    draw(&mut html, snapshot, now);
    html.finish()
}

fn draw(html: &mut Html, snapshot: &Snapshot, now: Timestamp) {
    let verdict = Verdict::of(snapshot);
    html.raw("<main id=state tabindex=-1 data-version=\"").raw(env!("CARGO_PKG_VERSION"));
    html.raw("\" data-title=\"").raw(verdict.word).raw("\"><div class=\"verdict ").raw(verdict.level.class());
    html.raw("\" role=status aria-live=polite><h2>")
        .raw(verdict.word)
        .raw("</h2><p>")
        .text(&verdict.sentence);
    html.raw("</p></div>");
    map::draw(html, snapshot, now);
    record::incidents(html, snapshot, now);
    record::sources(html, snapshot, now);
    html.raw("</main>");
}

/// The page's icon.
pub const ICON: &str = include_str!("icon.svg");

#[cfg(test)]
mod tests;
