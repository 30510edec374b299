#!/bin/bash
cd "$LOG_FOLDER" && sed -n "s/.* $PATTERN //p" server.log | LC_ALL=C sort -u > errors.txt
