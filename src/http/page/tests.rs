use super::*;
use crate::test_nodes as nodes;

#[test]
fn nothing_of_the_world_breaks_out() {
    let mut node = nodes::extreme();
    node.clients[0].command = Some("</code><script>alert(1)</script>".into());
    node.sources[0].reason = Some("\" onclick=\"x".into());
    let page = index(&node, nodes::noon(), "/\"><script>");
    assert_eq!(page.matches("<script").count(), 1, "only our own");
    assert!(page.contains("&lt;script&gt;alert(1)") && page.contains("&quot; onclick=&quot;x"));
    assert!(
        !page.contains(" style=") && !page.contains(" onclick=\""),
        "the content security policy forbids both"
    );
}

#[test]
fn four_hundred_clients_stay_small_and_counted() {
    let node = nodes::node(8, 50);
    let page = index(&node, nodes::noon(), "/metrics");
    assert!(page.contains("400 MPS clients."), "{page}");
    assert!(page.contains("more workloads"));
    let total = page.len() + STYLE.len() + SCRIPT.len() + ICON.len();
    eprintln!("{} + {} + {}", page.len(), STYLE.len(), SCRIPT.len());
    assert!(total < 120_000, "{total} bytes before compression");
    let small = index(&nodes::node(2, 6), nodes::noon(), "/metrics").len();
    assert!(small + STYLE.len() + SCRIPT.len() + ICON.len() < 60_000, "{small}");
}

#[test]
fn the_part_that_changes_is_in_the_page_as_it_is() {
    let node = nodes::node(2, 3);
    let part = state(&node, nodes::noon());
    assert!(index(&node, nodes::noon(), "/metrics").contains(&part));
    assert!(part.starts_with("<main id=state") && part.ends_with("</main>"));
}
