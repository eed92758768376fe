use std::fs;
use std::path::Path;

use super::*;
use crate::files::temp_folder;
use crate::snapshot::testing::allocation;

fn announcement(path: &Path, template: &str, reload: Reload) -> Announcement {
    let template = AnnounceTemplate::new(template).unwrap();
    let (node, path) = ("n1".to_owned(), path.to_owned());
    Announcement::new(node, path, template, reload)
}

#[test]
fn the_template_for_bird_has_a_route_for_each_range() {
    let template = AnnounceTemplate::new(BIRD).unwrap();
    let text = |ranges: &[&str]| template.render("n1", &allocation(ranges)).unwrap();
    let wanted = "\
# Written by the agent of Cadastre on the node n1, and written again after each change.
protocol static cadastre4 {
  ipv4;
  route 10.0.0.0/26 unreachable;
  route 10.0.0.64/26 unreachable;
}
protocol static cadastre6 {
  ipv6;
  route fd00::/122 unreachable;
}
";
    assert_eq!(text(&["10.0.0.64/26", "fd00::/122", "10.0.0.0/26"]), wanted);
    assert!(text(&[]).contains("{\n  ipv4;\n}\n"));
}

#[test]
fn a_template_can_tell_ranges_by_their_origin() {
    let text = "{% for r in ranges %}{{ r.cidr }} {{ r.pool }},{{ r.claim }},{{ r.borrowed }}\n{% endfor %}";
    let template = AnnounceTemplate::new(text).unwrap();
    let mut ranges = allocation(&["10.0.0.64/26", "10.0.1.0/30", "10.0.0.7/32"]);
    ranges.blocks[1].borrowed = true;
    ranges.blocks[2].pool = "shop/db/uid".to_owned();
    let text = template.render("n1", &ranges).unwrap();
    let wanted = "10.0.0.7/32 ,shop/db,False\n10.0.0.64/26 p,,False\n10.0.1.0/30 p,,True\n";
    assert_eq!(text.to_lowercase(), wanted.to_lowercase());
    for (wrong, says) in [
        ("{{ range }}", "range means nothing: use node, ranges"),
        ("{{ ranges[0].mask }}", "undefined"),
    ] {
        let error = AnnounceTemplate::new(wrong).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[tokio::test]
async fn the_daemon_is_told_after_a_start_and_after_each_change_until_it_reads() {
    let folder = temp_folder();
    let (file, log, broken) = (
        folder.join("routes"),
        folder.join("log"),
        folder.join("broken"),
    );
    let line = format!(
        "test ! -e {} && cat {} >>{}",
        broken.display(),
        file.display(),
        log.display()
    );
    let script = folder.join("reload.sh");
    fs::write(&script, line).unwrap();
    let reload = || Reload::Command(vec!["/bin/sh".to_owned(), script.display().to_string()]);
    let text = "{% for r in ranges %}{{ r.cidr }};{% endfor %}";
    let read = || fs::read_to_string(&log).unwrap_or_default();

    let it = announcement(&file, text, reload());
    for _ in 0..2 {
        it.refresh(&allocation(&["10.0.0.0/26"])).await.unwrap();
        assert_eq!(read(), "10.0.0.0/26;");
    }
    // After a restart, the agent does not know whether the daemon has read the file.
    let it = announcement(&file, text, reload());
    it.refresh(&allocation(&["10.0.0.0/26"])).await.unwrap();
    assert_eq!(read(), "10.0.0.0/26;".repeat(2));

    fs::write(&broken, "").unwrap();
    for _ in 0..2 {
        let error = it.refresh(&allocation(&[])).await.unwrap_err();
        assert!(
            error
                .0
                .contains("routing daemon has not read it: /bin/sh has ended"),
            "{error}"
        );
        let condition = condition(&Err(error));
        assert_eq!(
            (&*condition.status, &*condition.reason),
            ("False", "NotAnnounced")
        );
    }
    fs::remove_file(&broken).unwrap();
    fs::remove_file(&log).unwrap();
    fs::write(&file, "changed by somebody").unwrap();
    it.refresh(&allocation(&["10.0.0.64/26"])).await.unwrap();
    assert_eq!(read(), "10.0.0.64/26;");
    assert_eq!(condition(&Ok(())).status, "True");
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn the_template_of_the_page_about_bgp_works() {
    let page = include_str!("../../../../docs/bgp.md");
    let (_, rest) = page.split_once("    custom: |\n").unwrap();
    let (text, _) = rest.split_once("```").unwrap();
    let lines = text.lines().map(|it| it.get(6..).unwrap_or_default());
    let text = lines.collect::<Vec<_>>().join("\n");
    let template = AnnounceTemplate::new(&text).unwrap();
    let text = template.render("n1", &allocation(&["10.0.0.0/26", "fd00::/122"]));
    let wanted = "\
router bgp 64513
 address-family ipv4 unicast
  network 10.0.0.0/26
 exit-address-family
 address-family ipv6 unicast
  network fd00::/122
 exit-address-family
exit";
    assert_eq!(text.unwrap().trim_end(), wanted);
}

/// A write can fail after the file has its new name, when the folder is synced.
#[tokio::test]
async fn the_daemon_is_told_of_a_file_whose_write_has_failed_in_the_end() {
    let folder = temp_folder();
    let (routes, log) = (folder.join("routes"), folder.join("log"));
    let file = routes.join("bird.conf");
    let script = folder.join("reload.sh");
    fs::write(&script, format!("echo told >>{}", log.display())).unwrap();
    let reload = Reload::Command(vec!["/bin/sh".to_owned(), script.display().to_string()]);
    let it = announcement(
        &file,
        "{% for r in ranges %}{{ r.cidr }};{% endfor %}",
        reload,
    );
    it.refresh(&allocation(&["10.0.0.0/26"])).await.unwrap();
    fs::remove_dir_all(&routes).unwrap();
    fs::write(&routes, "in the way").unwrap();
    it.refresh(&allocation(&[])).await.unwrap_err();
    fs::remove_file(&routes).unwrap();
    put(&file, b"", 0o644).unwrap();
    it.refresh(&allocation(&[])).await.unwrap();
    assert_eq!(fs::read_to_string(&log).unwrap(), "told\n".repeat(2));
    fs::remove_dir_all(folder).unwrap();
}
