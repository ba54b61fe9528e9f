"""Inside a rank. The only room that imports torch; nothing above imports it."""
