//! The page at `/` with 400 clients, in a real Chromium. scripts/test-page looks at the demo's incident by itself.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use std::process::Command;

use support::nodes;
use support::server::serve;

#[tokio::test]
async fn four_hundred_clients_in_a_browser() {
    if !["chromium", "chromium-browser", "google-chrome"].iter().any(|name| is_installed(name)) {
        eprintln!("skipped: Chromium is not installed");
        return;
    }
    let server = serve(nodes::node(8, 50), None).await;
    let url = format!("http://{}/", server.address);
    let looking = tokio::task::spawn_blocking(move || {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/test-page");
        Command::new(script).env("PAGE_TEST_URL", url).output().unwrap()
    });
    let output = looking.await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).exists())
}
