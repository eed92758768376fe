use super::{By, map};
use crate::render::Report as _;
use crate::tests::{Cluster, style};

#[test]
fn a_range_over_several_cells_is_one_and_what_several_nodes_have_is_told() {
    let mut cluster = Cluster::new();
    let drawn = |cluster: &Cluster| {
        let map = map("p", 100, By::Owner, &cluster.inventory()).unwrap();
        let cells = &map.parts[0].cells;
        let last = (cells[2].at, cells[2].count, cells[2].owners.join(","));
        (last, map.text(&style()))
    };
    cluster.block("10.0.0.64/26", "p", "a");
    let (last, text) = drawn(&cluster);
    assert_eq!(last, (4, 4, "a".to_owned()));
    assert!(text.contains("AB..AAAA") && !text.contains("[!]"), "{text}");
    cluster.node("c", &["10.0.0.64/28"]);
    let (last, text) = drawn(&cluster);
    assert_eq!(last, (4, 1, "a,c".to_owned()));
    assert!(text.contains("AB..!AAA") && text.contains("[!]"), "{text}");
}
